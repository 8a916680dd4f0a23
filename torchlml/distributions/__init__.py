"""Probability distributions over sets of exactly k of n entries."""

from torchlml.distributions.ksubset import KSubset

__all__ = ["KSubset"]
