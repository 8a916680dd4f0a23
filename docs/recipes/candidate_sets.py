"""Candidate sets (slates): draw sets of k items, and compare their distribution with independent draws."""

import torch

import torchlml
from torchlml.distributions import KSubset

torch.manual_seed(0)
logits = torch.tensor([2.0, 1.5, 1.0, 0.0, 0.0, -1.0])
slates = KSubset(3, logits=logits)
for members in slates.sample((3,)).bool():
    names = members.nonzero().flatten()
    print(f"candidate {names.tolist()}: probability {slates.log_prob(names).exp():.3f}")

independent = torch.bernoulli(torchlml.lml(logits, 3).expand(10_000, 6))
exactly_three = (independent.sum(-1) == 3).float().mean()
print(f"independent draws have exactly three items in {exactly_three:.0%} of all cases")
print("inclusion, exact:", *(f"{p:.3f}" for p in slates.mean))
print("inclusion, lml:  ", *(f"{p:.3f}" for p in torchlml.lml(logits, 3)))
