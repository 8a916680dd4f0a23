"""Unknown k: the model predicts how many labels a sample has, and LML predicts which ones."""

import torch
from torch import nn
from torch.nn import functional as F

import torchlml

torch.manual_seed(0)
labels, width = 30, 16
rule = torch.randn(width, labels)


def draw(count):
    """Draw samples with 1 to 10 labels. The first feature determines the number of labels."""
    features = torch.randn(count, width)
    number = (5 + 2.5 * features[:, 0]).round().clamp(1, 10)
    rank = (features @ rule).argsort(descending=True).argsort()
    return features, rank < number[:, None]


body = nn.Sequential(nn.Linear(width, 128), nn.ReLU())
scores, counts = nn.Linear(128, labels), nn.Linear(128, 1)
optimizer = torch.optim.AdamW([*body.parameters(), *scores.parameters(), *counts.parameters()], lr=3e-3)
for step in range(401):
    features, target = draw(256)
    hidden = body(features)
    number = target.sum(-1).float()
    k = F.softplus(counts(hidden)).squeeze(-1).clamp(max=labels)
    # LML uses the true k of each sample. A predicted k would keep growing, as a larger k lowers the loss.
    loss = torchlml.lml_loss(scores(hidden), target, k=number) + (k - number).square().mean()
    if step % 200 == 0:
        rank = scores(hidden).argsort(descending=True).argsort()
        found = rank < k.round()[:, None]
        f1 = 2 * (found & target).sum() / (found.sum() + target.sum())
        print(f"step {step:3d}: mean error of k {(k - number).abs().mean():.2f}, F1 {f1:.2f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

y = torchlml.lml(scores(hidden), k)  # one fractional k for each row
print(f"the row sums equal k within {(y.sum(-1) - k).abs().max().item():.0e}")
