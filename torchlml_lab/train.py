"""`torchlml train NAME`: finds the experiment."""

from collections.abc import Sequence

from torchlml_lab.cli import Command, choose

EXPERIMENTS = {
    "cifar100": Command("torchlml_lab.tasks.cifar100.command", "top-5 classification under label noise"),
    "scene-graph": Command(
        "torchlml_lab.tasks.scene_graph.command", "all relations of an image, on Visual Genome or VRD"
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Trains the experiment that is named first in the arguments."""
    choose("train", EXPERIMENTS, arguments)
