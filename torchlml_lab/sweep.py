"""`torchlml sweep NAME`: finds the grid."""

from collections.abc import Sequence

from torchlml_lab.cli import Command, choose

SWEEPS = {
    "cifar100": Command("torchlml_lab.tasks.cifar100.sweep", "losses x noise levels x seeds, and tuning"),
    "scene-graph": Command("torchlml_lab.tasks.scene_graph.sweep", "methods x seeds, and tuning"),
}


def main(arguments: Sequence[str]) -> None:
    """Runs the grid that is named first in the arguments."""
    choose("sweep", SWEEPS, arguments)
