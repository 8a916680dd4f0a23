"""Assignment: three reviewers for each paper, at most five papers per reviewer, no conflicts of interest."""

import numpy as np
import torch
from scipy.optimize import linprog

import torchlml

PAPERS, REVIEWERS, K, MOST = 40, 30, 3, 5
torch.manual_seed(0)
fit = torch.rand(PAPERS, REVIEWERS, dtype=torch.float64)
fit += 0.5 * torch.rand(REVIEWERS, dtype=torch.float64)  # some reviewers are a good fit for every paper
allowed = torch.rand(PAPERS, REVIEWERS) > 0.1

# The best assignment, computed by linear programming.
rows = np.kron(np.eye(PAPERS), np.ones(REVIEWERS))
columns = np.kron(np.ones(PAPERS), np.eye(REVIEWERS))
best = -linprog(
    -fit.flatten().numpy(),
    A_eq=rows,
    b_eq=np.full(PAPERS, K),
    A_ub=columns,
    b_ub=np.full(REVIEWERS, MOST),
    bounds=[(0, float(a)) for a in allowed.flatten()],
).fun
top = torch.where(allowed, fit, -1).topk(K).indices
print(f"best assignment: total fit {best:.2f}")
print(f"top 3 for each paper: the busiest reviewer has {top.flatten().bincount().max()} papers")
for temperature in (0.1, 0.01, 0.001):
    y = torchlml.balanced_lml(fit / temperature, K, MOST, mask=allowed, bound="at_most")
    hard = y.topk(K)
    load = hard.indices.flatten().bincount().max()
    total = fit.gather(1, hard.indices).sum()
    print(f"temperature {temperature:5.3f}: total fit {(y * fit).sum():.2f} (soft)", end=", ")
    print(f"{total:.2f} (hard), the busiest reviewer has {load} papers")
