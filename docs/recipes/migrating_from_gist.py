"""Migrating from thomasahle's TopK gist: the same operator, without a fixed search interval."""

import torch

import torchlml

x = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)

# before: y = topk(x, 2)
y = torchlml.lml(x, 2)
print("y:", [round(each, 4) for each in y[0].tolist()])

y[0, 0].backward()
print("gradient of the first output:", [round(each, 4) for each in x.grad[0].tolist()])

# The gist searches within 10 of the logits. For 100,000 equal logits, the threshold is outside this interval.
y = torchlml.lml(torch.zeros(1, 100_000), 1)
print(f"sum over 100,000 equal logits: {y.sum().item():.4f}")

# before: a loop over the rows, to give each row its own k
y = torchlml.lml(torch.zeros(3, 4), torch.tensor([1.0, 2.5, 4.0]))
print("a k for each row:", y.sum(-1).tolist())

# before: hard = torch.zeros_like(x).scatter(1, x.topk(2).indices, 1.0); hard = hard + y - y.detach()
hard = torchlml.topk_mask(x, 2)
print("hard, with the same gradient:", hard[0].tolist())
