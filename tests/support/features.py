"""Write a small file of synthetic features whose classes are easy to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_features(folder: Path, width: int) -> Path:
    """Write 3000 samples, scattered around the centers of 100 fine classes, which form 20 coarse classes.

    Every fifth sample is a test sample.
    """
    path = folder / "features.npz"
    random = np.random.default_rng(0)
    fine = np.repeat(np.arange(100), 30)
    x = random.normal(size=(100, width))[fine] + 0.5 * random.normal(size=(3000, width))
    np.savez(path, x=x.astype(np.float32), fine=fine, coarse=fine // 5, test=np.arange(3000) % 5 == 0)
    return path
