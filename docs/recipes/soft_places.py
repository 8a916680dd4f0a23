"""Soft ranking: soft indicators of ranks, and a ranker trained with a soft version of NDCG."""

import torch
from torch import nn

import torchlml


def soft_places(x):
    """Return P with P[..., j, i] = lml(x, j + 1)[i] - lml(x, j)[i]. All rows and columns sum to 1."""
    n = x.shape[-1]
    rows = x.unsqueeze(-2)
    first = torchlml.lml(rows.expand(*x.shape, n), torch.arange(1.0, n + 1))  # row j: k = j + 1
    return first.diff(dim=-2, prepend=torch.zeros_like(rows))


x = torch.tensor([0.3, 2.0, -1.0, 0.9])
places = soft_places(x / 0.1)
print("most likely item at each rank:", places.argmax(-1).tolist())
print("sorted:", [round(value, 2) for value in (places @ x).tolist()])
print("ranks: ", [round(value, 2) for value in (torch.arange(1.0, 5) @ places).tolist()])
print("sums of the rows and columns:", *(f"{value:.4f}" for value in [*places.sum(-1), *places.sum(-2)]))

torch.manual_seed(0)
queries, items, width = 200, 20, 8
features = torch.randn(queries, items, width)
truth = torch.randn(width)
grades = (features @ truth + torch.randn(queries, items)).relu().round()
discount = 1 / torch.log2(torch.arange(items) + 2.0)
gain = 2**grades - 1
best = (gain.sort(descending=True).values * discount).sum(-1)


def ndcg(scores):
    return ((gain.gather(-1, scores.argsort(descending=True)) * discount).sum(-1) / best).mean()


ranker = nn.Linear(width, 1)
optimizer = torch.optim.Adam(ranker.parameters(), lr=0.03)
for step in range(201):
    scores = ranker(features).squeeze(-1)
    soft = (discount @ soft_places(scores / 0.1) * gain).sum(-1) / best
    optimizer.zero_grad()
    (-soft.mean()).backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: soft NDCG {soft.mean():.3f}, NDCG {ndcg(scores):.3f}")
print(f"NDCG of the weights that generated the grades: {ndcg(features @ truth):.3f}")
