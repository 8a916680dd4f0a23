"""Uncertainty of a set: how confident a model is in its k answers as a whole, not in each answer."""

import torch

from torchlml.distributions import KSubset

logits = torch.tensor(
    [
        [6.0, 6.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # three clear answers
        [6.0, 6.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0],  # two clear answers and an open third one
        [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0],  # nothing is clear
    ]
)
d = KSubset(3, logits=logits)
best = d.log_prob(d.mode).exp()
for row in range(3):
    sizes = f"{d.entropy()[row].exp():.1f} of {d.enumerate_support().shape[0]}"
    print(f"the top three are correct with probability {best[row]:.2f}, effective number of sets: {sizes}")
