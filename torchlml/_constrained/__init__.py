"""Constrained softmax and constrained sparsemax."""
