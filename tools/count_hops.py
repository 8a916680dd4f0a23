"""Count the functions that a call enters, and the files that contain them.

    python tools/count_hops.py            # print the counts for all calls
    python tools/count_hops.py --trace    # also list the functions in call order

Each Python function in torchlml (in torchlml_lab for `torchlml train multilabel`) is counted once per call.
Comprehensions are not counted, nor is module-level or class-level code that runs on import.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchlml
from torchlml_lab import cli

Hop = tuple[str, str]  # the file and the function


def hops(call: Callable[[], Any], package: str = "torchlml") -> list[Hop]:
    """Return the distinct functions of a package that a call enters once caches are filled, in call order."""
    found: dict[Hop, None] = {}
    library = str(ROOT / package)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(library + "/")
        if event == "call" and inside and code.co_name not in ("<genexpr>", "<listcomp>"):
            found[
                str(Path(code.co_filename).relative_to(ROOT)), getattr(code, "co_qualname", code.co_name)
            ] = None

    call()
    # The call above fills the caches. Only the second call is recorded.
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls on ordinary tensors, by name."""
    x = torch.randn(8, 20)
    leaf = x.clone().requires_grad_()
    general = torch.randn(2, 20, 3, dtype=torch.bfloat16)
    target = torch.randint(20, (8,))
    return {
        "lml(x, 5)": lambda: torchlml.lml(x, 5),
        "lml(x, 5).backward()": lambda: torchlml.lml(leaf, 5).sum().backward(),
        "lml of a 3-D bfloat16 tensor along dim 1": lambda: torchlml.lml(general, 5, dim=1),
        "lml_dual(x, 5)": lambda: torchlml.lml_dual(x, 5),
        "lml_loss(x, target, 5).backward()": lambda: torchlml.lml_loss(leaf, target, 5).backward(),
    }


def dtensor_call(mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a call to `lml` with a DTensor whose labels are sharded across a mesh."""
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    return lambda: torchlml.lml(sharded, 5)


CSV = "text,tags\n" + "".join(
    f"{first} {second},{first};{second}\n"
    for first, second in itertools.permutations(("red", "green", "blue", "small", "large"), 2)
)
"""A table with a text column and a label column."""
SVMLIGHT = "".join(f"{i},{j} {i}:1 {j}:0.5\n" for i, j in itertools.permutations(range(5), 2))
"""Samples with sparse features and labels, in svmlight format."""


def training_calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return calls to `torchlml train multilabel` on small files, which are written to `folder`."""
    runs = itertools.count()

    def call(name: str, content: str) -> Callable[[], None]:
        (folder / name).write_text(content, encoding="utf-8")

        def train() -> None:
            out = str(folder / f"run-{next(runs)}")
            options = ["--train", str(folder / name), "--out", out, "--epochs", "1"]
            with contextlib.redirect_stdout(io.StringIO()):
                code = cli.main(["train", "multilabel", *options])
            if code:
                raise RuntimeError(f"`torchlml train multilabel` failed with exit code {code}")

        return train

    return {
        "train multilabel, CSV": call("texts.csv", CSV),
        "train multilabel, svmlight": call("features.txt", SVMLIGHT),
    }


def report(name: str, found: list[Hop], trace: bool) -> None:
    """Print how many functions in how many files a call enters and, if `trace` is True, the functions."""
    print(f"{name}: {len(found)} functions in {len({file for file, _ in found})} files")
    if trace:
        print("".join(f"    {file}: {function}\n" for file, function in found), end="")


def main() -> None:
    """Print a line for each call and, with `--trace`, its functions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", action="store_true", help="also list the functions in call order")
    trace = parser.parse_args().trace
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for name, call in {**calls(), "lml of a DTensor": dtensor_call(mesh)}.items():
        report(name, hops(call), trace)
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        for name, call in training_calls(Path(folder)).items():
            report(name, hops(call, "torchlml_lab"), trace)


if __name__ == "__main__":
    main()
