"""The predicted and the true relations of an image."""

from __future__ import annotations

import torch

EXAMPLE = (
    {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]),
        "labels": torch.tensor([3, 7]),
        "pairs": torch.tensor([[0, 1], [1, 0]]),
        "scores": torch.tensor([[0.9, 0.8], [0.2, 0.3]]),
    },
    {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 41]]),
        "labels": torch.tensor([3, 7]),
        "relations": torch.tensor([[0, 1, 0], [0, 1, 1]]),
    },
)
