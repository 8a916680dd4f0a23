"""A differentiable planner (cross-entropy method) that learns its cost function from an expert's actions."""

import torch

import torchlml

HORIZON, SAMPLES, ELITES = 8, 100, 10


def roll(start, actions):
    """Return the positions of a mass that starts at rest, for forces `actions` (batch, samples, HORIZON)."""
    velocity = 0.5 * actions.cumsum(-1)
    return start[:, None, None] + 0.5 * velocity.cumsum(-1)


def plan(cost, start, rounds=6, temperature=0.1):
    """Repeatedly sample plans, select the elites softly with LML, and fit a Gaussian to them."""
    noise = torch.Generator().manual_seed(0)
    mean, std = torch.zeros(len(start), HORIZON), torch.ones(len(start), HORIZON)
    for _ in range(rounds):
        draws = torch.randn(len(start), SAMPLES, HORIZON, generator=noise)
        plans = mean[:, None] + std[:, None] * draws
        value = cost(roll(start, plans), plans)
        value = (value - value.mean(1, keepdim=True)) / value.std(1, keepdim=True)
        elite = torchlml.lml(-value / temperature, ELITES)[..., None] / ELITES  # sums to 1 over the plans
        mean = (elite * plans).sum(1)
        std = (elite * (plans - mean[:, None]) ** 2).sum(1).sqrt() + 1e-3
    return mean


def cost(goal, effort):
    return lambda place, push: (place[..., -1] - goal) ** 2 + effort * push.square().sum(-1)


start = torch.linspace(-1, 1, 16)
expert = plan(cost(2.0, 0.1), start)
goal, effort = torch.zeros((), requires_grad=True), torch.ones((), requires_grad=True)
optimizer = torch.optim.Adam([goal, effort], lr=0.1)
for step in range(61):
    error = (plan(cost(goal, effort.abs()), start) - expert).square().mean()
    if step % 30 == 0:
        print(f"step {step:3d}: error {error.item():.4f}, goal {goal.item():.2f}, effort {effort.item():.2f}")
    optimizer.zero_grad()
    error.backward()
    optimizer.step()
