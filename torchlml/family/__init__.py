"""The relatives of the projection: other regularisers, its value, hard and random choices.

One room each: `constrained_softmax` and `constrained_sparsemax` (what they share is in `capped`), `value`
(what logsumexp is to softmax) and `choices` (hard ones with a gradient, and random ones).
"""
