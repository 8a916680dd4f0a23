"""Migrating from DEXML: `alpha` multiplies the logits, and the logarithm is a separate function."""

import torch

import torchlml

torch.manual_seed(0)
scores = torch.randn(4, 1000)  # scores of 1000 labels for each of 4 queries, from a dual encoder
positive = torch.zeros(4, 1000, dtype=torch.bool)
positive[torch.arange(4), torch.randint(1000, (4,))] = True
alpha, k = 20.0, 5

# before: y = topk(scores, k, alpha, 32)
y = torchlml.lml(alpha * scores, k)
print("sums:", [round(each, 5) for each in y.sum(-1).tolist()])

# before: log_y = dist_log_topk(scores, k, alpha, 32); loss = -(log_y * positive).sum(1).mean()
log_y = torchlml.log_lml(alpha * scores, k)
loss = -(log_y * positive).sum(1).mean()
print(f"loss from log_lml: {loss.item():.4f}")

# Or in one call, which does not store log_y for the backward pass.
print(f"lml_loss:          {torchlml.lml_loss(alpha * scores, positive, k).item():.4f}")

# The number of steps does not have to be chosen, even if alpha is large.
print("sums:", [round(each, 5) for each in torchlml.lml(1e4 * scores, k).sum(-1).tolist()])
