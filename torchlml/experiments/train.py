"""`torchlml train NAME`: finds the experiment."""

from collections.abc import Sequence

from torchlml.cli import Command, choose

EXPERIMENTS = {
    "cifar100": Command("torchlml.experiments.cifar100.command", "top-5 classification under label noise"),
    "scene-graph": Command(
        "torchlml.experiments.scene_graph.command", "all relations of an image, on Visual Genome or VRD"
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Trains the experiment that is named first in the arguments."""
    choose("train", EXPERIMENTS, arguments)
