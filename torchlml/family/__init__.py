"""The relatives of the projection: limits on the sum, other regularisers, its value, hard and random choices.

One room each: `bounds` (at most, at least k), `constrained_softmax`, `constrained_sparsemax`, `value` (what
logsumexp is to softmax), `topk_mask` (a hard choice with a gradient) and `sampling` (a random one).
"""
