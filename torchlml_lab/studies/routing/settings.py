"""The settings of the routing study."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RoutingSettings:
    """Train a character model with a mixture of 16 experts, 2 per token, with each router."""

    seeds: int = 3
    """How many times each router is trained, with other weights and batches, at least once."""
    steps: int = 400
    """Training steps of 2048 tokens each, a multiple of 20."""
    learning_rate: float = 0.003
    """The learning rate of Adam, the same for all routers."""
    csv: Path = Path("torchlml-routing.csv")
    """The CSV to write. Runs that it already contains are not repeated."""
    out: Path = Path("torchlml-routing.png")
    """The PNG or SVG to draw from the CSV, with the tables next to it as Markdown."""
