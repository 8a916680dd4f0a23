"""`torchlml train NAME`: finds the task."""

from collections.abc import Sequence

from torchlml_lab.cli import choose
from torchlml_lab.tasks import TASKS


def main(arguments: Sequence[str]) -> None:
    """Train the task that is named first in the arguments."""
    choose("train", {name: task.train for name, task in TASKS.items()}, arguments)
