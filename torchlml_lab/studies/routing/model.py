"""A small character model with one mixture of experts, and the text it learns."""

import functools
import pydoc_data.topics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchlml

Routed = tuple[Tensor, Tensor, Tensor]


class TopK(nn.Module):
    """The k largest softmax probabilities, scaled to the sum 1, and with `alpha` the loss of Switch.

    The loss is alpha n sum_j f_j P_j, f_j the share of the assignments that expert j gets and P_j its mean
    probability (Fedus, Zoph and Shazeer, 2022).
    """

    def __init__(self, experts: int, k: int, alpha: float = 0.0) -> None:
        super().__init__()
        self.experts, self.k, self.alpha = experts, k, alpha

    def forward(self, logits: Tensor) -> Routed:
        p = logits.softmax(-1)
        weights, indices = p.topk(self.k)
        share = torch.bincount(indices.flatten(), minlength=self.experts) / indices.numel()
        loss = self.alpha * self.experts * (share * p.mean(0)).sum()
        return weights / weights.sum(-1, keepdim=True), indices, loss


class LossFree(nn.Module):
    """A bias for each expert that moves by `rate` after every step, up if the expert had too few tokens.

    The bias chooses the experts, and sigmoid scores without it are the weights (Wang and others, 2024).
    """

    bias: Tensor

    def __init__(self, experts: int, k: int, rate: float) -> None:
        super().__init__()
        self.experts, self.k, self.rate = experts, k, rate
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, logits: Tensor) -> Routed:
        scores = logits.sigmoid()
        indices = (scores.detach() + self.bias).topk(self.k).indices
        if self.training:
            load = torch.bincount(indices.flatten(), minlength=self.experts).float()
            self.bias += self.rate * torch.sign(load.mean() - load)
        weights = scores.gather(-1, indices)
        return weights / weights.sum(-1, keepdim=True), indices, logits.new_zeros(())


class Sinkhorn(nn.Module):
    """Experts by the balanced plan of Sinkhorn's iterations in training, by the logits at inference.

    The weights are softmax probabilities (S-BASE of Clark and others, 2022). An entry of the plan may exceed
    the one unit that a token can give an expert.
    """

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.experts, self.k = experts, k

    def forward(self, logits: Tensor) -> Routed:
        order = logits.detach()
        if self.training:
            order = order + self._column_potential(order)
        indices = order.topk(self.k).indices
        weights = logits.softmax(-1).gather(-1, indices)
        return weights / weights.sum(-1, keepdim=True), indices, logits.new_zeros(())

    def _column_potential(self, logits: Tensor) -> Tensor:
        """The logarithm of the column scaling, up to a relative column error of 0.01."""
        tokens, experts = logits.shape
        v = logits.new_zeros(experts)
        for _ in range(100):
            sums = (logits + v).log_softmax(-1).logsumexp(0) + torch.log(torch.tensor(experts / tokens))
            v = v - sums
            if float(sums.abs().max()) < 0.01:
                break
        return v


class Balanced(nn.Module):
    """`torchlml.TopKRouter`."""

    def __init__(self, experts: int, k: int, temperature: float) -> None:
        super().__init__()
        self.router = torchlml.TopKRouter(experts, k, temperature=temperature)

    def forward(self, logits: Tensor) -> Routed:
        weights, indices, _ = self.router(logits)
        return weights, indices, logits.new_zeros(())


ROUTERS: dict[str, Callable[[int, int], nn.Module]] = {
    "no balancing": TopK,
    "auxiliary loss, 0.01": lambda n, k: TopK(n, k, 0.01),
    "auxiliary loss, 0.1": lambda n, k: TopK(n, k, 0.1),
    "loss-free bias, 0.001": lambda n, k: LossFree(n, k, 0.001),
    "loss-free bias, 0.01": lambda n, k: LossFree(n, k, 0.01),
    "Sinkhorn": Sinkhorn,
    "TopKRouter, T = 1": lambda n, k: Balanced(n, k, 1.0),
    "TopKRouter, T = 0.1": lambda n, k: Balanced(n, k, 0.1),
}


EXPERTS, K = 16, 2
WIDTH, HIDDEN, CONTEXT = 64, 64, 64


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Python's own help texts for training and for validation, and the number of distinct characters.

    They come with Python, so the study needs no download. The last tenth of each topic is for validation.
    """
    topics = [str(topic) for _, topic in sorted(pydoc_data.topics.topics.items())]
    number = {character: i for i, character in enumerate(sorted(set("".join(topics))))}
    parts: tuple[list[int], list[int]] = ([], [])
    for topic in topics:
        cut = len(topic) * 9 // 10
        for part, piece in zip(parts, (topic[:cut], topic[cut:]), strict=True):
            part.extend(number[character] for character in piece)
    return torch.tensor(parts[0]), torch.tensor(parts[1]), len(number)


def batch(data: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random excerpts, and the same one character later."""
    starts = torch.randint(len(data) - CONTEXT, (size, 1), generator=generator)
    excerpts = data[starts + torch.arange(CONTEXT + 1)]
    return excerpts[:, :-1], excerpts[:, 1:]


class Experts(nn.Module):
    """Two-layer networks, of which each token uses k."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        token = order // K
        sizes = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        parts = x[token].split(sizes)
        out = [F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        return torch.zeros_like(x).index_add(0, token, torch.cat(out) * weights.flatten()[order, None])


class Model(nn.Module):
    """One layer of causal attention, then the mixture; the next character of each position."""

    def __init__(self, router: str, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.before, self.between, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.router, self.experts = ROUTERS[router](EXPERTS, K), Experts()
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, characters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of the next characters, the load of each expert (1 is fair) and the router's loss."""
        x = self.embedding(characters) + self.position
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(self.before(x)).chunk(3, -1)
        ]
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        tokens = self.between(x).flatten(0, 1)
        weights, indices, loss = self.router(self.gate(tokens))
        x = x + self.experts(tokens, weights, indices).view_as(x)
        load = torch.bincount(indices.flatten(), minlength=EXPERTS) * (EXPERTS / indices.numel())
        return self.head(self.after(x)), load, loss
