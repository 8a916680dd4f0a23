"""A router for mixture-of-experts layers that balances the load of its experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchlml._arguments import check_integer_k, check_number, check_tensor
from torchlml.balanced import balanced
from torchlml.projection import lml


class Routing(NamedTuple):
    """The weights and indices of the experts chosen for each token, and the bias `mu` of every expert.

    The weights and indices have shape (..., k), and `mu` has shape (num_experts,).
    """

    weights: Tensor
    indices: Tensor
    mu: Tensor


class TopKRouter(nn.Module):
    """Choose exactly k experts for each token, with balanced load and without an auxiliary loss.

        >>> router = torchlml.TopKRouter(num_experts=8, k=2)
        >>> weights, indices, mu = router(torch.randn(16, 8))
        >>> weights.shape, indices.shape, mu.shape
        (torch.Size([16, 2]), torch.Size([16, 2]), torch.Size([8]))

    Args:
        num_experts: the number of experts.
        k: the number of experts that each token uses, an integer.
        temperature: the number by which the logits are divided.
        normalize: whether the weights of a token are scaled to sum to 1. Otherwise, each weight is an entry
            of the projection, between 0 and 1.
        decay: the fraction of the stored bias that each training step keeps, at least 0 and less than 1.
        capacity_factor: the maximum number of tokens per expert in training, relative to a perfectly balanced
            load on this process. The maximum is rounded up. If an expert exceeds it, its assignments with the
            smallest weights are dropped: their weights become 0. By default, no assignment is dropped.
        group: the data-parallel processes. The load is balanced over the tokens of all these processes. By
            default, each process balances its own tokens.

    In training, `balanced_lml` gives every expert the same total weight. Its multipliers mu are the bias that
    balances this batch: each token uses the k experts with the largest values of logits / temperature + mu.
    The weights have the exact gradient of the two-sided projection. The buffer `bias` stores an exponential
    moving average of mu, which is also the initial guess for the next step.

    In evaluation mode, the router is causal: the stored bias replaces mu, and `lml` computes the weights.
    The routing of a token then does not depend on the other tokens in its batch.

    `forward` takes logits of shape (..., num_experts), where the leading dimensions index tokens. The keyword
    argument `mask` is a bool tensor with the shape of the leading dimensions. It is False for padding. The
    result is a named tuple (weights, indices, mu). The weights and indices of the chosen experts have shape
    (..., k), and mu has shape (num_experts,). Padding tokens have weights of 0, and their indices are
    meaningless.
    """

    bias: Tensor
    updates: Tensor

    def __init__(
        self,
        num_experts: int,
        k: int,
        *,
        temperature: float = 1.0,
        normalize: bool = True,
        decay: float = 0.9,
        capacity_factor: float | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.k = check_integer_k(k)
        if not isinstance(num_experts, int) or isinstance(num_experts, bool) or num_experts < self.k:
            raise ValueError(
                f"`num_experts` must be an integer that is at least k = {self.k}, but it is {num_experts!r}."
            )
        check_number(temperature, "temperature", "a finite number above 0", 0)
        if temperature == 0:
            raise ValueError("`temperature` must be a finite number above 0, but it is 0.")
        check_number(decay, "decay", "at least 0 and less than 1", 0)
        if decay >= 1:
            raise ValueError(f"`decay` must be at least 0 and less than 1, but it is {decay}.")
        if capacity_factor is not None:
            check_number(capacity_factor, "capacity_factor", "None or a finite number that is at least 1", 1)
        self.num_experts, self.group = num_experts, group
        self.temperature, self.normalize, self.decay = temperature, normalize, decay
        self.capacity_factor = capacity_factor
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Reset the stored bias. Call this after `to_empty` if the router was created on the meta device."""
        self.bias.zero_()
        self.updates.zero_()

    def forward(self, logits: Tensor, *, mask: Tensor | None = None) -> Routing:
        check_tensor(logits, "logits", logits)
        if logits.dim() == 0 or logits.shape[-1] != self.num_experts:
            raise ValueError(
                f"`logits` must have a last dimension of size num_experts = {self.num_experts}, "
                f"but the shape is {tuple(logits.shape)}."
            )
        tokens = logits.reshape(-1, self.num_experts)
        if tokens.dtype in (torch.bfloat16, torch.float16):
            tokens = tokens.float()  # in half precision, logits plus bias would have too many ties
        tokens = tokens / self.temperature
        present = self._present(mask, logits)
        if present is not None:
            tokens = torch.where(present[:, None], tokens, 0)  # padding may contain NaN
        y, mu = self._balance(tokens, present) if self.training else self._apply_bias(tokens)
        # An expert that takes all of its available tokens has mu = +inf, and adding it to -inf gives NaN.
        forbidden = tokens == -torch.inf
        indices = torch.where(forbidden, -torch.inf, tokens + mu).detach().topk(self.k, dim=-1).indices
        weights = y.gather(-1, indices)
        if self.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1)  # padding tokens may have a total of 0
        if present is not None:
            weights = torch.where(present[:, None], weights, 0)
        if self.training and self.capacity_factor is not None:
            weights = self._drop(weights, indices, present)
        shape = (*logits.shape[:-1], self.k)
        return Routing(weights.to(logits.dtype).reshape(shape), indices.reshape(shape), mu.detach())

    def extra_repr(self) -> str:
        settings = f"num_experts={self.num_experts}, k={self.k}, temperature={self.temperature}"
        settings += f", normalize={self.normalize}, decay={self.decay}"
        return (
            settings
            if self.capacity_factor is None
            else f"{settings}, capacity_factor={self.capacity_factor}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Move or cast the module, but keep the bias in float32 or wider, so that no update is lost."""
        before = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype in (torch.bfloat16, torch.float16):
            self.bias = before.to(self.bias.device, torch.float32)
        return self

    def _present(self, mask: Tensor | None, logits: Tensor) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != logits.shape[:-1]:
            received = (
                f"has dtype {mask.dtype} and shape {tuple(mask.shape)}"
                if isinstance(mask, Tensor)
                else f"has type {type(mask).__name__}"
            )
            wanted = tuple(logits.shape[:-1])
            raise ValueError(f"`mask` must be a bool tensor of shape {wanted}, but it {received}.")
        return mask.reshape(-1)

    def _balance(self, tokens: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute Y and mu for this batch, and update the stored bias."""
        k = self.k if present is None else self.k * present.double()
        start = self.bias if int(self.updates) else None
        y, _, mu = balanced(tokens, k, None, None, "exactly", start, self.group)
        if not bool(mu.isfinite().any()):  # a batch without tokens does not change the bias
            return y, mu
        with torch.no_grad():
            keep = self.decay if int(self.updates) else 0.0
            finite = torch.where(mu.isfinite(), mu, 0).to(self.bias.dtype)
            self.bias.mul_(keep).add_(finite, alpha=1 - keep)
            self.updates.add_(1)
        return y, mu

    def _apply_bias(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mu = self.bias.to(tokens.dtype, copy=True)  # later updates must not change this result
        return lml(tokens + mu, self.k), mu

    def _drop(self, weights: Tensor, indices: Tensor, present: Tensor | None) -> Tensor:
        """Set the smallest weights of overfull experts to 0."""
        count = len(weights) if present is None else int(present.sum())
        most = math.ceil((self.capacity_factor or 1) * count * self.k / self.num_experts)
        flat, expert = weights.detach().flatten(), indices.flatten()
        # Sort by expert, then by descending weight. The rank of an assignment is its index among the
        # assignments to the same expert.
        order = flat.argsort(descending=True, stable=True)
        order = order[expert[order].argsort(stable=True)]
        sizes = torch.bincount(expert, minlength=self.num_experts)
        starts = sizes.cumsum(0) - sizes
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - starts[expert[order]]
        return torch.where((rank < most).reshape(weights.shape), weights, 0)
