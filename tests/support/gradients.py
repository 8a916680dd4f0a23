"""Upstream gradients for tests, and tolerances for the computed gradients."""

from __future__ import annotations

import numpy as np
import torch

from tests.support import truth


def upstream(n: int) -> np.ndarray:
    return np.cos(np.arange(n) * 0.7) + 0.3


def slack(row: truth.Row, dtype: torch.dtype) -> np.ndarray:
    """Return the relative tolerance for each w = y (1 - y). It grows with |z|, because z is rounded."""
    return (1e-6 if dtype == torch.float32 else 1e-11) * np.maximum(
        1.0, np.where(row.alive, np.abs(row.z), 1.0)
    )


def resolved(row: truth.Row) -> bool:
    """Whether some logit is within 1e6 of the threshold.

    Otherwise, for example if the threshold lies in a gap of 1e38 between two logits, nu is rounded too
    coarsely to distinguish logits that differ by 1.
    """
    return float(np.abs(row.z[row.alive]).min()) < 1e6
