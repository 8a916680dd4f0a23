"""Draw social-card.png, the preview image of links to the site: `python docs/images/social_card.py`.

The image shows the logits of the first example in the playground.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from matplotlib.figure import Figure

import torchlml

HERE = Path(__file__).parent
BLUE, ORANGE, GRAY, INK = "#0072B2", "#C77C00", "#8A8A8A", "#1F2328"
K = 3


def start_logits() -> list[float]:
    """Return the logits of the first example in the playground."""
    page = (HERE.parent / "playground" / "index.html").read_text(encoding="utf-8")
    found = re.search(r'\["Start", \{ logits: \[([^\]]+)\], k: 3 \}', page)
    if found is None:
        raise ValueError("the playground has no example `Start` with k = 3")
    return [float(value) for value in found[1].split(",")]


def draw(picture: Path) -> None:
    """Draw bar charts of softmax times k and of LML next to each other, at 1200 x 630 pixels."""
    x = torch.tensor(start_logits(), dtype=torch.float64)
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    figure.text(0.05, 0.87, "Select k of n, with gradients", fontsize=40, fontweight="bold", color=INK)
    figure.text(0.05, 0.785, f"Ten logits, k = {K}: the playground of torchlml", fontsize=22, color="#57606A")
    for left, title, y, color in (
        (0.05, "softmax × k", K * torch.softmax(x, -1), ORANGE),
        (0.53, "LML", torchlml.lml(x, K), BLUE),
    ):
        axes = figure.add_axes((left, 0.09, 0.42, 0.53))
        axes.set_title(title, loc="left", fontsize=25, fontweight="bold", color=color, pad=14)
        axes.bar(
            range(len(x)), y, color=["white" if v > 1 else color for v in y], edgecolor=color, linewidth=2
        )
        for i, value in enumerate(y.tolist()):
            axes.patches[i].set_hatch("//" if value > 1 else "")
            if value > 0.5:
                ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axes.text(i, value + 0.05, f"{value:.2f}", ha="center", fontsize=19, color=INK, bbox=ground)
        axes.axhline(1, color=GRAY, linewidth=1.5, linestyle=(0, (4, 3)), zorder=2)
        axes.set_ylim(0, 2)
        axes.set_yticks([0, 1], ["0", "1"], fontsize=18, color="#57606A")
        axes.set_xticks(range(len(x)), "abcdefghij", fontsize=18, color="#57606A")
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    # The logits are stored in the file, so that a test can tell whether the picture is up to date.
    figure.savefig(picture, metadata={"Description": f"LML of {x.tolist()} with k = {K}"})


if __name__ == "__main__":
    draw(HERE / "social-card.png")
