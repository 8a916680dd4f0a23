"""A mixture of experts whose router selects exactly k experts for each token."""

import torch
from torch import nn

import torchlml

EXPERTS, K, WIDTH = 8, 2, 16


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens):
        scores = self.router(tokens)
        gate = torchlml.topk_mask(scores, K) * torchlml.lml(scores, K)  # k nonzero weights, none above 1
        token, expert = gate.nonzero(as_tuple=True)  # only the selected experts are computed
        out = torch.einsum("td,tdo->to", tokens[token], self.experts[expert]) * gate[token, expert, None]
        return torch.zeros_like(tokens).index_add(0, token, out), gate


torch.manual_seed(0)
truth = torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5  # a linear map for each of four kinds of tokens
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(401):
    kind = torch.randint(4, (256,))
    tokens = torch.randn(256, WIDTH)
    tokens[:, :4] = 3 * torch.nn.functional.one_hot(kind, 4)
    wanted = torch.einsum("td,tdo->to", tokens, truth[kind])
    found, gate = model(tokens)
    load = gate.gt(0).float().mean(0) / K  # the fraction of all assignments that each expert receives
    loss = (found - wanted).square().mean() + 0.1 * EXPERTS * (load * gate.mean(0) / K).sum()
    if step % 200 == 0:
        error = (found - wanted).square().mean() / wanted.square().mean()
        chosen = gate.gt(0).sum(-1)
        print(
            f"step {step:3d}: error {error.item():.3f}, {chosen.min()} to {chosen.max()} experts per token,",
            end=" ",
        )
        print(f"largest share of one expert {load.max().item():.2f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
