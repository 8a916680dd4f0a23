"""Attribution masks: rank millions of units by training one score per unit, with masks of many sizes."""

import torch

import torchlml

torch.manual_seed(0)
UNITS, RELEVANT = 2_700_000, 1000
relevant = torch.randperm(UNITS)[:RELEVANT]
effect = torch.zeros(UNITS)
effect[relevant] = torch.linspace(10, 2, RELEVANT)  # the effect of a unit on the model's output

scores = torch.zeros(UNITS, requires_grad=True)
for step in range(61):
    # After the first step, log(k) is uniform, so that small and large masks are equally frequent.
    k = 5 if step == 0 else int(10 ** (1 + 3 * torch.rand(()).item()))
    mask = torchlml.lml(scores, k)
    output = mask @ (effect + torch.randn(UNITS))  # measured effects are noisy
    (gradient,) = torch.autograd.grad(output, scores)
    with torch.no_grad():
        scores += gradient / gradient.abs().max()  # normalized, because its scale depends on k
    if step % 20 == 0:
        found = torch.isin(scores.topk(RELEVANT).indices, relevant).float().mean()
        print(f"step {step}: k = {k}, the mask sums to {mask.detach().double().sum():.3f}", end="")
        print(f", relevant units among the top 1000: {found:.1%}")

ranking, best = scores.argsort(descending=True), effect.sort(descending=True).values
for k in (10, 100, 1000):
    print(f"the first {k} units have {effect[ranking[:k]].sum() / best[:k].sum():.1%} of the maximum effect")
