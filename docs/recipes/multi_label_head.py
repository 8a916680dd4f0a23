"""A multi-label head: four tags are correct, but only one of them is observed in training."""

import torch
from torch import nn
from torch.nn import functional as F

import torchlml
from torchlml.metrics import TopKRecall

torch.manual_seed(0)
tags, k, rows = 60, 4, 3000
features = torch.randn(rows, 32)
true = (features @ torch.randn(32, tags)).topk(k).indices  # (rows, 4): all correct tags
shown = true.gather(1, torch.randint(k, (rows, 1))).squeeze(1)  # the observed tag
train, test = slice(0, 2000), slice(2000, rows)


def sigmoids(logits, label):
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(label, tags).float())


losses = {
    "BCE": sigmoids,
    "cross-entropy": F.cross_entropy,
    "LML": lambda logits, label: torchlml.lml_loss(logits, label, k),
}
for name, loss in losses.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, tags))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        batch = torch.randint(2000, (256,))
        optimizer.zero_grad()
        loss(model(features[batch]), shown[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(features[test])
        recall = TopKRecall(k=k)(logits, true[test])
        chance = torchlml.lml(logits, k).gather(1, true[test]).mean()
    print(f"{name:13s}  recall@4 {recall:.2f}, mean probability of a correct tag {chance:.2f}")
