"""The names of the operators related to lml."""

from __future__ import annotations

MEMBERS = ["lml_value", "constrained_softmax", "constrained_sparsemax", "topk_mask", "sample_subset"]
