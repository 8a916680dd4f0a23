"""The ways to find nu: Newton's method (the default) and the paper's Algorithm 1."""

from torchlml.solvers.bracketing import Bracketing

__all__ = ["Bracketing"]
