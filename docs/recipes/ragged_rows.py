"""Rows of different lengths: visual relations, where each pair of objects in an image adds candidates."""

import torch
from torch import nn

import torchlml
from torchlml.metrics import TopKRecall

torch.manual_seed(0)
predicates, k = 10, 6
rule = torch.randn(12, predicates)  # weights of the true scores of all relations, unknown to the model


def images(count):
    """Return the features of all pairs, the offsets of each image's scores, and the observed relations."""
    pairs, ends, observed = [], [0], []
    for objects in torch.randint(3, 9, (count,)).tolist():
        pair = torch.randn(objects * (objects - 1), 12)
        best = (pair @ rule).flatten().topk(k).indices  # over pairs and predicates together
        observed.append(ends[-1] + best[torch.randperm(k)[:2]])  # two of six relations are observed
        pairs.append(pair)
        ends.append(ends[-1] + pair.shape[0] * predicates)
    return torch.cat(pairs), torch.tensor(ends), torch.cat(observed)


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, predicates))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(201):
    pairs, offsets, observed = images(16)
    scores = model(pairs).flatten()
    loss = torchlml.lml_loss(scores, observed, k, offsets=offsets)
    if step % 100 == 0:
        recall = TopKRecall(k=k)(scores.detach(), observed, offsets=offsets)
        print(f"step {step:3d}: loss {loss.item():.2f}, recall@6 on new images {recall:.2f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

y = torchlml.lml(scores.detach(), k, offsets=offsets)
lengths = offsets.diff()
sums = torch.segment_reduce(y, "sum", lengths=lengths)
print(f"images have {lengths.min()} to {lengths.max()} candidates, and every row sums to {sums.min():.3f}")
