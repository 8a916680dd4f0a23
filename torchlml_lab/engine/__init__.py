"""The training engine that all tasks share: one loop, one directory per run, and runs that can be resumed.

A task consists of a frozen dataclass of settings (a subclass of `settings.TrainSettings`) and a `loop.Task`:
the network, the data, the loss and the metrics. `run.train` does the rest.
"""
