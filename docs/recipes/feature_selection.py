"""Feature selection: exactly k of n inputs reach the model, and the choice is learned by gradient descent."""

import torch
from torch.nn import functional as F

from torchlml.distributions import KSubset

torch.manual_seed(0)
features, k = 30, 4
relevant = torch.tensor([3, 11, 17, 28])
x = torch.randn(2000, features)
y = x[:, relevant] @ torch.tensor([1.0, -2.0, 1.5, 1.0])

logits = torch.zeros(features, requires_grad=True)
weights = torch.zeros(features, requires_grad=True)
optimizer = torch.optim.Adam([logits, weights], lr=0.05)
for step in range(601):
    chosen = KSubset(k, logits=logits).rsample((16,))  # exactly k ones, with the gradient of the mean
    loss = F.mse_loss((chosen * weights) @ x.T, y.expand(16, -1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(
            f"step {step}: error {loss.item():.2f}, entropy {KSubset(k, logits=logits).entropy().item():.2f}"
        )
selected = KSubset(k, logits=logits).mode.nonzero().flatten()
print(f"selected {selected.tolist()}, relevant {relevant.tolist()}")
