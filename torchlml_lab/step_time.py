"""`torchlml step-time [RUN]`: what a training step costs with each loss of a task."""

import importlib
from collections.abc import Sequence

from torchlml_lab.commands import ask_task
from torchlml_lab.tasks import TASKS

WITHOUT_RUN = "scene-graph"
"""The task whose `step-time` needs no run: its data are named by `--vg` or `--vrd`."""


def main(arguments: Sequence[str]) -> None:
    """Ask the task that made the run; without a run, that of scene graphs."""
    modules = {name: task.step_time for name, task in TASKS.items()}
    module = modules[WITHOUT_RUN]
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help" and module is not None:
        importlib.import_module(module).main(arguments)
    else:
        ask_task("step-time", modules, "which has nothing to time", arguments)
