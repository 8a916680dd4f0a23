"""Rewards for whole sets: learn which k items work well together from the total reward of each set."""

import torch

from torchlml.distributions import KSubset

torch.manual_seed(0)
items, k = 20, 3
value = torch.rand(items)
bonus = torch.zeros(items, items)
bonus[4, 9] = bonus[9, 13] = bonus[4, 13] = 2.0  # these three are worth far more together


def reward(chosen):
    """Return the reward of each set, which is not a sum over its members."""
    return chosen @ value + torch.einsum("bi,ij,bj->b", chosen, bonus, chosen)


logits = torch.zeros(items, requires_grad=True)
optimizer = torch.optim.Adam([logits], lr=0.05)
for step in range(401):
    policy = KSubset(k, logits=logits)
    chosen = policy.sample((128,))
    gained = reward(chosen)
    advantage = gained - gained.mean()
    loss = -(advantage * policy.log_prob(chosen)).mean() - 0.02 * policy.entropy()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: reward {gained.mean():.2f}")
best_alone = value.topk(3).indices.tolist()
print(f"learned set {policy.mode.nonzero().flatten().tolist()}, best individual items {best_alone}")
