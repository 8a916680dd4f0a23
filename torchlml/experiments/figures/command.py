"""`torchlml figures NAME`: finds the figure."""

from collections.abc import Sequence

from torchlml.cli import Command, choose

FIGURES = {
    "projection": Command(
        "torchlml.experiments.figures.projection", "one row through softmax, sigmoid and lml"
    ),
    "which-relaxation": Command(
        "torchlml.experiments.figures.which_relaxation", "the same logits through five relaxations"
    ),
    "cifar100": Command(
        "torchlml.experiments.figures.cifar100", "accuracy against label noise, from a sweep"
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Draws the figure that is named first in the arguments."""
    choose("figures", FIGURES, arguments)
