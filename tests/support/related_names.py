"""The operators related to the layer, by name."""

from __future__ import annotations

MEMBERS = ["lml_value", "constrained_softmax", "constrained_sparsemax", "topk_mask", "sample_subset"]
