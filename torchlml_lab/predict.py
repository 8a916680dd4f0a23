"""`torchlml predict RUN`: print and draw a prediction of a run."""

from collections.abc import Sequence

from torchlml_lab.commands import ask_task
from torchlml_lab.tasks import TASKS


def main(arguments: Sequence[str]) -> None:
    """Ask the task that made the run."""
    modules = {name: task.predict for name, task in TASKS.items()}
    ask_task("predict", modules, "which has nothing to draw", arguments)
