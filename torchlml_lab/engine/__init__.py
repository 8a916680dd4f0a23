"""The training engine of all tasks: one loop, a folder per run, and runs that survive being killed.

A task is a frozen dataclass of settings (`settings.TrainSettings` and what it adds) and a `loop.Task`: the
network, the data, the loss and the measures. `run.train` does the rest.
"""
