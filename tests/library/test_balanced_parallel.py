"""The two-sided projection with rows split across processes, and the router under DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import torchlml
from tests.support.distributed import in_processes, part, same_on_all, whole

Group = dist.ProcessGroup
F64 = torch.float64


@in_processes(2, 3, 4)
def test_values_and_gradients(group: Group) -> None:
    """y, nu, mu and all gradients match the unsharded call. The shards are uneven, and some are empty."""
    for dtype, limit in ((F64, 1e-8), (torch.float32, 5e-4)):
        for bound in ("exactly", "at_most"):
            for masked in (False, True):
                _like_unsplit(dtype, limit, bound, masked, group)


def _like_unsplit(dtype: torch.dtype, limit: float, bound: str, masked: bool, group: Group) -> None:
    x = (torch.randn(60, 5, dtype=F64) + 2 * torch.randn(5, dtype=F64)).to(dtype).requires_grad_()
    k = (0.5 + torch.rand(60, dtype=F64)).requires_grad_()
    share = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.3], dtype=F64)
    capacity = (k.detach().sum() * share * (1.2 if bound == "at_most" else 1)).requires_grad_()
    mask = torch.rand(60, 5) < 0.8 if masked else torch.ones(60, 5, dtype=torch.bool)
    mask[:, 4] = mask[:, 3] = True
    grad, grad_nu = torch.randn(60, 5, dtype=dtype), torch.randn(60, dtype=dtype)
    options: Any = {"bound": bound}
    y = torchlml.balanced_lml(x, k, capacity, mask=mask, **options)
    wanted = torch.autograd.grad(y, (x, k, capacity), grad)
    nu, mu = torchlml.balanced_lml_dual(x, k, capacity, mask=mask, **options)
    wanted_nu = torch.autograd.grad(nu, (x, k, capacity), grad_nu)

    own_x, own_k = (part(t.detach(), group, 0).requires_grad_() for t in (x, k))
    own_c = capacity.detach().clone().requires_grad_()
    own: Any = {"mask": part(mask, group, 0), "group": group, **options}
    own_y = torchlml.balanced_lml(own_x, own_k, own_c, **own)
    found = torch.autograd.grad(own_y, (own_x, own_k, own_c), part(grad, group, 0))
    own_nu, own_mu = torchlml.balanced_lml_dual(own_x, own_k, own_c, **own)
    found_nu = torch.autograd.grad(own_nu, (own_x, own_k, own_c), part(grad_nu, group, 0))
    assert same_on_all(own_mu, group)
    assert same_on_all(found[2], group)

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=20 * limit, atol=limit * max(1, float(b.detach().abs().max())))

    close(whole(own_y, group, 0), y)
    close(whole(own_nu, group, 0), nu)
    close(own_mu, mu)
    for ours, theirs in ((found, wanted), (found_nu, wanted_nu)):
        close(whole(ours[0], group, 0), theirs[0])
        close(whole(ours[1], group, 0), theirs[1])
        close(ours[2], theirs[2])


def _rounds(group: Group, x: Tensor, **options: Any) -> int:
    """Count the rounds of communication in a forward pass with k = 2, and check the column sums."""
    if "mask" in options:
        options["mask"] = part(options["mask"], group, 0)
    with CommDebugMode() as counted:
        y = torchlml.balanced_lml(part(x, group, 0), 2, group=group, **options)
    capacity = options.get("capacity", 2 * len(x) / x.shape[1])
    error = whole(y, group, 0).double().sum(0) / capacity - 1
    if options.get("bound") != "at_most":
        error = error.abs()
    assert float(error.max()) <= (1e-9 if x.dtype == F64 else 1e-4)
    return counted.get_total_counts()


@in_processes(2, 3)
def test_rounds(group: Group) -> None:
    """A forward pass takes at most six rounds, even if the rows differ greatly between processes."""
    for dtype in (torch.float32, F64):
        for skew in (0, 3, 10):
            x = (torch.randn(2048, 16) + skew * torch.randn(16)).to(dtype)
            unlike = x[x.argmax(1).argsort()]
            unlike[:700, :3] += 5
            mask = (torch.rand(2048, 16) < 0.7) | (torch.arange(16) >= 12)
            far = 30 * torch.randn(16)
            for options in (
                {},
                {"mask": mask},
                {"start": far},
                {"start": far, "mask": mask},
                {"bound": "at_most", "capacity": 256.0},
                {"bound": "at_most", "capacity": 320.0, "start": far},
                {"bound": "at_most", "capacity": 300.0, "mask": mask},
                {"bound": "at_most", "capacity": 1000.0},
            ):
                for rows in (x, unlike):
                    rounds = _rounds(group, rows, **options)
                    assert rounds <= 6, (dtype, skew, list(options), rows is x, rounds)


@in_processes(2)
def test_rounds_of_periodic_rows(group: Group) -> None:
    """A forward pass takes at most six rounds, even if rows repeat or depend on their position."""
    for dtype in (torch.float32, F64):
        for skew in (1, 10):
            x = (torch.randn(4096, 16) + skew * torch.randn(16)).to(dtype)
            for period in (8, 16):
                repeated = x.clone()
                repeated[::period] = 5 * torch.randn(16).to(dtype)
                by_position = x + (3 * torch.randn(period, 16)).repeat(4096 // period, 1).to(dtype)
                for rows in (repeated, by_position):
                    own = rows.chunk(2)[dist.get_rank(group)]  # each process has complete periods
                    with CommDebugMode() as counted:
                        torchlml.balanced_lml(own, 2, group=group)
                    rounds = counted.get_total_counts()
                    assert rounds <= 6, (dtype, skew, period, rows is repeated, rounds)


@in_processes(2, 4)
def test_rounds_from_a_good_start(group: Group) -> None:
    """A good `start` saves the round that gathers a sample of rows. The backward pass takes one round."""
    for dtype, most in ((torch.float32, 4), (F64, 5)):
        x = (torch.randn(4096, 32) + 3 * torch.randn(32)).to(dtype)
        own = part(x, group, 0)
        mu = torchlml.balanced_lml_dual(own, 2, group=group)[1]
        own = (own + 0.03 * torch.randn(32).to(dtype)).requires_grad_()
        with CommDebugMode() as counted:
            y = torchlml.balanced_lml(own, 2, start=mu, group=group)
        assert counted.get_total_counts() <= most
        with CommDebugMode() as counted:
            y.backward(torch.ones_like(y))
        assert counted.get_total_counts() == 1


@in_processes(2)
def test_rounds_of_small_hostile_problems(group: Group) -> None:
    """All rows of a small problem are gathered, so solving it at decreasing temperatures adds no rounds."""
    mask = torch.ones(256, 16, dtype=torch.bool)
    mask[:32, 4:] = False  # 32 rows may use only four columns, whose capacity is barely sufficient
    tight = torch.tensor([16.5] * 4 + [446 / 12] * 12, dtype=F64)
    for scale in (100.0, 1e4):
        for bound in ("exactly", "at_most"):
            x = scale * torch.randn(512, 16, dtype=F64)
            assert _rounds(group, x, bound=bound, capacity=64.0) <= 6
    assert _rounds(group, torch.randn(256, 16, dtype=F64), mask=mask, capacity=tight) <= 6


@in_processes(2)
def test_unlike_processes(group: Group) -> None:
    """The result is accurate even if rows on different processes strongly prefer different columns."""
    x = torch.randn(400, 8, dtype=F64)
    x[:133, :2] += 20
    x[133:, 4:] += 300
    capacity = torch.tensor([0.0, 100, 100, 100, 100, 100, 200, 100], dtype=F64)
    y = torchlml.balanced_lml(part(x, group, 0), 2, capacity, group=group)
    sums = whole(y, group, 0).sum(0)
    torch.testing.assert_close(sums, capacity, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole(y, group, 0), torchlml.balanced_lml(x, 2, capacity), rtol=0, atol=1e-7)


@in_processes(2)
def test_errors_on_all_processes(group: Group) -> None:
    first = dist.get_rank(group) == 0
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="NaN"):
        torchlml.balanced_lml(x * (torch.nan if first else 1), 1, group=group)
    with pytest.raises(ValueError, match="same capacity"):
        torchlml.balanced_lml(x, 1, torch.tensor([2.0, 3.0, 3.0 + first]), bound="at_most", group=group)
    with pytest.raises(ValueError, match="same number of columns"):
        torchlml.balanced_lml(torch.zeros(4, 3 + first), 1, group=group)
    with pytest.raises(ValueError, match=r"`k` sums to 8.*`capacity` sums to 9"):
        torchlml.balanced_lml(x, 1, 3, group=group)
    with pytest.raises(ValueError, match="two dimensions"):
        torchlml.balanced_lml(x[None], 1, group=group)
    mask = torch.tensor([[first, True, True]]).expand(4, 3)
    with pytest.raises(ValueError, match=r"column 0 .* 4 available rows"):
        torchlml.balanced_lml(x, 1, torch.tensor([5.0, 2.0, 1.0]), mask=mask, group=group)
    mask = torch.tensor([[True, not first, not first]]).expand(4, 3)
    with pytest.raises(ValueError, match="No solution exists"):
        torchlml.balanced_lml(x, 1, torch.tensor([3.0, 3.0, 2.0]), mask=mask, group=group)


class Mixture(nn.Module):
    """A linear gate and four linear experts, of which each token uses two."""

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 4)
        self.router = torchlml.TopKRouter(4, 2, group=group)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.router(self.gate(x))
        return torch.einsum(
            "tkio,ti,tk->to", self.experts[indices], x, weights
        ).clone()  # FSDP2 warns about views


def _trained(model: nn.Module, rows: slice) -> list[float]:
    """Train for three steps on the given rows of three fixed batches, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for seed in range(3):
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)) + torch.arange(6) / 2
        loss = (model(x[rows]) - x[rows].flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check_training(wrapped: nn.Module, inner: Mixture, group: Group) -> None:
    """Check that training with rows split across processes matches training with all rows in one process."""
    alone = Mixture(None)
    wanted = _trained(alone, slice(None))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    losses = torch.tensor(_trained(wrapped, slice(64 // size * rank, 64 // size * (rank + 1))))
    dist.all_reduce(losses, group=group)
    torch.testing.assert_close(losses / size, torch.tensor(wanted), rtol=2e-3, atol=1e-4)
    assert wanted[2] < wanted[0]
    for found, right in zip(inner.parameters(), alone.parameters(), strict=True):
        full = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(full, right, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(inner.router.bias, alone.router.bias, rtol=0, atol=2e-3)
    assert same_on_all(inner.router.bias, group)


@in_processes(2)
def test_router_under_ddp(group: Group) -> None:
    model = Mixture(group)
    _check_training(DistributedDataParallel(model, process_group=group), model, group)


@in_processes(4)
def test_dtensors(group: Group) -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="DTensor"):
        torchlml.balanced_lml(x, 1)


@in_processes(4)
def test_router_under_fsdp2(group: Group) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = Mixture(mesh.get_group())
    _check_training(fully_shard(model, mesh=mesh), model, mesh.get_group())
