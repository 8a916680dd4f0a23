"""Probability distributions over choices of exactly k of n."""

from torchlml.distributions.ksubset import KSubset

__all__ = ["KSubset"]
