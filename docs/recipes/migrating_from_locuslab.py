"""Migrating from locuslab/lml: change the import, or use the function, which has more features."""

import torch

import torchlml

# before: from lml import LML
from torchlml.compat import LML

x = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, 0.5, 0.0, 3.0]])

y = LML(N=2)(x)  # every argument of the original is accepted: eps, n_iter, branch, verbose
print("the same class:  ", [round(each, 4) for each in y[0].tolist()])

# before: y = LML(N=2, eps=1e-4)(x)
y = torchlml.lml(x, 2)
print("the function:    ", [round(each, 4) for each in y[0].tolist()])

# before: y = LML(N=1)(x.t()).t()
y = torchlml.lml(x, 1, dim=0)
print("any dimension:   ", y.sum(0).tolist())

# before: loss = -torch.log(LML(N=2)(x).gather(1, label) + 1e-8).mean()
label = torch.tensor([[3], [2]])
print(f"the loss:         {torchlml.lml_loss(x, label, 2).item():.4f}")

# before: rows padded with -1e10
y = torchlml.lml(x, 2, mask=torch.tensor([[True, True, True, False], [True, True, False, False]]))
print("with a mask:     ", [[round(each, 3) for each in row] for row in y.tolist()])
