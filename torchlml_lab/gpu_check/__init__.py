"""`torchlml gpu-check`: verify the kernels on your GPU, and measure their speed and memory."""

from collections.abc import Sequence
from pathlib import Path

from torchlml_lab.cli_errors import BadInput, answer_help

USAGE = """usage: torchlml gpu-check [FILE]

Compare projections of many kinds of rows on the GPU with float64 projections
on the CPU, capture a projection in a CUDA graph, time lml, log_lml and LMLLoss
against softmax, log_softmax and cross_entropy, and measure the peak memory.
Print a verdict and write all results to FILE, which you can attach to an issue.
The exit code is 1 if a check fails.

arguments:
  FILE        JSON file to write (default: torchlml-gpu-check.json)
"""


def read_arguments(arguments: Sequence[str]) -> Path:
    """Return the file to write. Options, or more than one argument, raise `BadInput`."""
    answer_help(arguments, USAGE)
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise BadInput(f"`torchlml gpu-check` takes one file name, but got `{' '.join(arguments)}`.")
    return Path(arguments[0] if arguments else "torchlml-gpu-check.json")
