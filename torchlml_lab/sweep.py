"""`torchlml sweep NAME`: finds the task."""

from collections.abc import Sequence

from torchlml_lab.cli import choose
from torchlml_lab.tasks import TASKS


def main(arguments: Sequence[str]) -> None:
    """Run the grid of the task that is named first in the arguments."""
    choose("sweep", {name: task.sweep for name, task in TASKS.items() if task.sweep}, arguments)
