"""Sparse autoencoders: a learned gate selects k latents per sample, or k per sample on average."""

import torch
from torch import nn
from torch.nn import functional as F

import torchlml

WIDTH, LATENTS, K, TEMPERATURE = 32, 64, 4, 0.3
torch.manual_seed(0)
atoms = F.normalize(torch.randn(LATENTS, WIDTH), dim=-1)


def draw(count):
    """Draw samples that are weighted sums of 1 to 7 atoms, 4 on average."""
    active = torch.rand(count, LATENTS).argsort(-1) < torch.randint(1, 8, (count, 1))
    return (active * (0.5 + torch.rand(count, LATENTS))) @ atoms


def no_gradient(x):
    return torch.zeros_like(x).scatter(-1, x.topk(K).indices, 1.0)


def per_sample(x):
    return torchlml.topk_mask(x / TEMPERATURE, K)


def per_batch(x):
    return torchlml.topk_mask(x.flatten() / TEMPERATURE, K * len(x)).view_as(x)


for select in (no_gradient, per_sample, per_batch):
    torch.manual_seed(1)
    gate, encoder, decoder = nn.Linear(WIDTH, LATENTS), nn.Linear(WIDTH, LATENTS), nn.Linear(LATENTS, WIDTH)
    gate.weight.data = F.normalize(gate.weight.data, dim=-1)
    encoder.weight.data, decoder.weight.data = gate.weight.data.clone(), gate.weight.data.T.clone()
    optimizer = torch.optim.Adam([*gate.parameters(), *encoder.parameters(), *decoder.parameters()], lr=1e-2)
    for step in range(401):
        x = draw(256 if step < 400 else 4096)
        opened = select(gate(x))
        loss = F.mse_loss(decoder(opened * encoder(x).relu()), x) / x.var()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = (F.normalize(decoder.weight, dim=0).T @ atoms.T).amax(0) > 0.95
    used = opened.sum(-1)
    print(
        f"{select.__name__}: {used.min():.0f} to {used.max():.0f} latents, {used.mean():.2f} on average;",
        end=" ",
    )
    print(f"unexplained variance {loss:.3f}, {found.float().mean():.0%} of the atoms recovered")
