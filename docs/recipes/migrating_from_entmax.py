"""Migrating from entmax: replace sparsemax and budget layers, and use caps and -inf entries."""

import torch

import torchlml

x = torch.tensor([[1.5, 0.75, 0.25, -1.0], [0.2, 0.1, 0.0, -0.1]])


def show(name, y):
    print(f"{name:20s}", [[round(each, 4) for each in row] for row in y.tolist()])


# before: y = entmax.sparsemax(x, dim=-1)
show("sparsemax", torchlml.constrained_sparsemax(x, 1))

# before: y = entmax.budget_bisect(x, budget=2)
show("a budget of 2", torchlml.constrained_sparsemax(x, 2))

# before: y = entmax.budget_bisect(x, budget=torch.tensor([[1.5], [3.0]]))
show("a budget per row", torchlml.constrained_sparsemax(x, torch.tensor([1.5, 3.0])))

# entmax has no cap per entry, and `budget_bisect` returns NaN if an entry is -inf.
show("a cap per entry", torchlml.constrained_sparsemax(x, 2, upper=torch.tensor([0.5, 1.0, 1.0, 1.0])))
show("with -inf", torchlml.constrained_sparsemax(torch.tensor([[1.0, 0.5, -torch.inf]]), 1))

# Unlike constrained sparsemax, lml has a nonzero gradient even if the scores are well separated.
sharp = torch.tensor([4.0, 3.0, -3.0, -4.0], requires_grad=True)
for layer in (torchlml.constrained_sparsemax, torchlml.lml):
    (gradient,) = torch.autograd.grad(layer(sharp, 2)[1], sharp)
    print(f"{layer.__name__:22s} gradient of the second output: {gradient[1].item():.4f}")
