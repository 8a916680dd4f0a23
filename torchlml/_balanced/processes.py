"""Rows that are split across processes: agreement on the arguments, sums and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Processes:
    """The processes that hold the rows of one matrix. Every sum has the same bits on all of them."""

    def __init__(self, group: Any) -> None:
        from torchlml._distributed import group as groups  # takes long to import, and few calls need it

        self._groups = groups
        self._group = groups.label_group(group)

    @property
    def rank(self) -> int:
        """The position of this process."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._group.size

    def agree(self, device: torch.device, read: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
        """Read the arguments on every process, and raise on all of them if one fails: one round.

        `read` returns the arguments and a message to the others, whose entry "same" must match on all
        processes. Returns the arguments and the messages of all processes.
        """
        problem: Exception | None = None
        arguments: Any = None
        try:
            arguments, told = read()
        except Exception as error:  # the others wait for a message
            problem, told = error, {"error": str(error)[:300]}
        everyone = self._groups.exchange(self._group, device, told)
        if problem is not None:
            raise problem
        self._groups.check_agreement(everyone)
        return arguments, everyone

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all processes along a new first dimension: one round."""
        return self._group.gather(part)

    def add(self, parts: Tensor) -> Tensor:
        """Add up gathered parts in the order of the ranks."""
        return self._groups.add_up(parts)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all processes: one round."""
        return self.add(self.gather(part))

    def sample(self, x: Tensor, k: Tensor, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """About `size` rows of all processes with their k, in proportion to the rows of each: one round."""
        total = max(sum(rows), 1)
        wanted = [min(own, -(-size * own // total)) for own in rows]
        step = max(1, x.shape[0] // max(wanted[self.rank], 1))
        taken = torch.arange(wanted[self.rank], device=x.device) * step
        # The messages have one size. A row with k = 0 has no effect.
        part = x.new_zeros((max(wanted), x.shape[1] + 1), dtype=torch.float32)
        part[: len(taken), :-1] = x[taken]
        part[: len(taken), -1] = k[taken]
        parts = self.gather(part).flatten(0, 1)
        return parts[:, :-1], parts[:, -1].double()
