"""The training engine of all experiments: one loop, a folder per run, and runs that survive being killed.

An experiment is a frozen dataclass of settings (`TrainSettings` and what it adds) and a `Task`: the network,
the data, the loss and the measures. `train` does the rest.
"""

from torchlml_lab.engine.folder import RunFolder
from torchlml_lab.engine.loop import Task, train
from torchlml_lab.engine.settings import TrainSettings, read_settings

__all__ = ["RunFolder", "Task", "TrainSettings", "read_settings", "train"]
