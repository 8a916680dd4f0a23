"""Exploration: show a slate of k items, observe clicks on these items only, and learn without bias."""

import torch

import torchlml

torch.manual_seed(0)
items, k = 40, 5
clicks = torch.rand(items) ** 3  # click probability of each item, unknown to the learner
best = clicks.topk(k).values.sum().item()


def learn(explore):
    """Train a ranking, and return the expected number of clicks on its top k items."""
    logits = torch.zeros(items, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        batch = logits.expand(32, items)
        y = torchlml.lml(batch, k)
        shown = torchlml.sample_subset(batch, k) if explore else torchlml.topk_mask(batch, k).detach()
        clicked = shown * torch.bernoulli(clicks.expand(32, items))
        # An item is shown with probability exactly y, so dividing by y makes the estimate unbiased.
        reward = (y * clicked / y.detach()).sum(-1).mean()
        optimizer.zero_grad()
        (-reward).backward()
        optimizer.step()
    return clicks[logits.topk(k).indices].sum().item()


print(f"clicks per slate: best five {best:.2f}, five random items {clicks.mean().item() * k:.2f}")
print(f"always the top five: {learn(explore=False):.2f}")
print(f"sample_subset:       {learn(explore=True):.2f}")
