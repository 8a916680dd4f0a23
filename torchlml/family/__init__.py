"""The relatives of the projection: other regularisers, its value, hard and random choices.

One room each: `constrained_softmax` and `constrained_sparsemax` (what they share is in `capped`), `value`
(what logsumexp is to softmax), `topk_mask` (a hard choice with a gradient) and `sampling` (a random one).
"""
