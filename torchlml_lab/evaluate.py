"""`torchlml evaluate RUN`: measure a run with its best weights."""

from collections.abc import Sequence

from torchlml_lab.commands import ask_task
from torchlml_lab.tasks import TASKS


def main(arguments: Sequence[str]) -> None:
    """Ask the task that made the run."""
    modules = {name: task.evaluate for name, task in TASKS.items()}
    ask_task("evaluate", modules, "which has nothing to measure", arguments)
