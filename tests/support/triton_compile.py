"""Compile the Triton kernels for GPUs that need not be present, and report their resource use.

    python -m tests.support.triton_compile sm_80 sm_90 sm_100 gfx942

This prints a line of JSON for each variant and target, with the number of registers, spilled bytes and bytes
of shared memory. For NVIDIA, ptxas reports these numbers while Triton compiles. For AMD, they are in the
metadata of the code object.
"""
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from typing import Any, NamedTuple

# Triton reads these variables on import. They make it print the ptxas log and ignore its compilation cache.
os.environ["TRITON_DUMP_PTXAS_LOG"] = os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchlml._triton import layer as triton_layer
from torchlml._triton import loss as triton_loss
from torchlml._triton import plan
from torchlml._triton import split as triton_split

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARGUMENTS = {
    "k_ptr": "*fp64",
    "offsets_ptr": "*i64",
    "mask_ptr": "*i1",
    "nu_ptr": "*fp32",
    "dk_ptr": "*fp64",
    "parts_ptr": "*fp64",
    "state_ptr": "*fp32",
    "rows": "i32",
    "n": "i32",
    "size": "i64",
    "k_stride": "i32",
    "starts_ptr": "*i64",
    "weight_ptr": "*fp32",
    "loss_ptr": "*fp32",
    "per_row": "i32",
    "grad_stride": "i32",
}
ENTRIES = ("x_ptr", "y_ptr", "grad_ptr", "dx_ptr")
DENSE = {"mask_ptr": None, "offsets_ptr": None}
PACKED: dict[str, None] = {}
ONE_CLASS = {**DENSE, "starts_ptr": None, "weight_ptr": None, "LABELS": 1}
MULTI_HOT = {**DENSE, "starts_ptr": None, "LABELS": 0}
LISTS = {"LABELS": 32}  # in jagged batches, with weights and a mask
COMMON = 4096  # kernels for rows up to this length must not spill registers


class Variant(NamedTuple):
    """A kernel variant to compile."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    dtype: str
    warps: int
    length: int


def variants(lanes: int) -> list[Variant]:
    """Return variants of all kernels, with the block sizes and numbers of warps that `plan` chooses."""
    forward, backward = triton_layer.forward_kernel, triton_layer.backward_kernel
    found: list[Variant] = []

    def add(
        name: str, kernel: Any, length: int, dtype: str = "fp32", rows: int = 1000, **constants: Any
    ) -> None:
        packed = "offsets_ptr" not in constants
        how = plan(rows, length, packed, 108, lanes)
        known = {"BLOCK": how.block, "LOOP": how.loop, "SPLITS": how.splits, "WIDTH": 8, **constants}
        used = {key: value for key, value in known.items() if key in kernel.arg_names}
        found.append(Variant(name, kernel, used, dtype, how.warps, length))

    for length in (100, 500, 1000, 2000, 4000, 8000, 100_000):
        add("y", forward, length, LOG=False, **DENSE)
        add("gradient of y", backward, length, OF=0, **DENSE)
    for length in (1000, 4000):
        add("log y", forward, length, "bf16", LOG=True, **DENSE)
        add("gradient of log y", backward, length, "bf16", OF=1, **DENSE)
        add("y of jagged rows with a mask", forward, length, "fp16", LOG=False, **PACKED)
    add("nu", forward, 1000, y_ptr=None, LOG=False, **DENSE)
    add("gradient of nu", backward, 1000, y_ptr=None, OF=2, **DENSE)
    add("gradient of log y of jagged rows with a mask", backward, 1000, OF=1, **PACKED)
    long = {"length": 1_000_000, "rows": 4, **DENSE}
    add("split: survey", triton_split.survey_kernel, **long)
    add("split: evaluate", triton_split.evaluate_kernel, **long)
    add("split: finish", triton_split.finish_kernel, **long)
    add("split: write", triton_split.write_kernel, LOG=False, **long)
    add("split: slope", triton_split.slope_kernel, OF=0, **long)
    add("split: gradient", triton_split.gradient_kernel, OF=0, **long)
    add("split: begin", triton_split.begin_kernel, **long)
    add("split: move", triton_split.move_kernel, **long)
    losses = (
        ("loss", triton_loss.loss_forward_kernel),
        ("gradient of loss", triton_loss.loss_backward_kernel),
    )
    for name, kernel in losses:
        add(name, kernel, 1000, **ONE_CLASS)
        add(name, kernel, 4000, "bf16", **ONE_CLASS)
        add(f"{name}, multi-hot", kernel, 4000, **MULTI_HOT)
        add(f"{name}, lists in jagged rows", kernel, 1000, "fp16", **LISTS)
    long = {"length": 1_000_000, "rows": 4, **ONE_CLASS}
    add("split: loss", triton_loss.split_loss_kernel, **long)
    add("split: slope of loss", triton_loss.split_slope_kernel, **long)
    add("split: gradient of loss", triton_loss.split_gradient_kernel, **long)
    add("split: add loss", triton_loss.add_loss_kernel, **long)
    return found


def measure(variant: Variant, target: str) -> dict[str, Any]:
    """Compile a variant, and return its register and memory use and how it rounds to bfloat16."""
    name, kernel, constants, dtype, warps, length = variant
    types = {**ARGUMENTS, **dict.fromkeys(ENTRIES, f"*{dtype}")}
    if "LABELS" in constants:  # the upstream gradient of a loss has one value per row
        types |= {"grad_ptr": "*fp32", "labels_ptr": "*i64" if constants["LABELS"] else "*i1"}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else types[argument] for argument in kernel.arg_names
    }
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    registers, spilled = _nvidia(said.getvalue()) if target.startswith("sm_") else _amd(compiled)
    return {
        "variant": f"{name}, {dtype}, n = {length}",
        "common": length <= COMMON,
        "target": target,
        "warps": warps,
        "registers": registers,
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "rounds": dtype == "bf16"
        and not {"y_ptr", "dx_ptr"}.isdisjoint(set(kernel.arg_names) - set(constants)),
        "rounding": sorted(set(re.findall(r"cvt\.(r[a-z])\S*\.bf16", compiled.asm.get("ptx", "")))),
    }


def _nvidia(said: str) -> tuple[int, int]:
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", said))
    return registers, sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))


def _amd(compiled: Any) -> tuple[int, int]:
    assembly = compiled.asm["amdgcn"]
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", assembly)
    return int(registers), sum(int(n) for n in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", assembly))


def chosen(target: str) -> list[Variant]:
    """Return all variants for sm_80, and one variant per kernel (bfloat16 if possible) for other targets."""
    found = variants(TARGETS[target].warp_size)
    if target == "sm_80":
        return found
    found.sort(key=lambda variant: (variant.length <= COMMON, variant.dtype == "bf16", variant.length))
    return list({variant.kernel: variant for variant in found}.values())


if __name__ == "__main__":
    for target in sys.argv[1:]:
        for variant in chosen(target):
            sys.stdout.write(json.dumps(measure(variant, target)) + "\n")
            sys.stdout.flush()
