"""`torchlml gpu-check`: is what the kernels compute on your GPU right, and what does it cost?"""

from collections.abc import Sequence
from pathlib import Path

from torchlml_lab.cli_errors import BadInput, answer_help

USAGE = """usage: torchlml gpu-check [FILE]

Projects rows of every kind on the GPU and compares them with float64 on the
CPU; captures a projection in a CUDA graph; times lml, log_lml and LMLLoss
beside softmax, log_softmax and cross_entropy; looks at the peak of memory.
Prints a verdict, and writes everything to FILE, to attach to an issue. Exits
with 1 if a check fails.

arguments:
  FILE        the JSON file to write (torchlml-gpu-check.json)
"""


def read_arguments(arguments: Sequence[str]) -> Path:
    """The file to write; anything but one file name raises `BadInput`."""
    answer_help(arguments, USAGE)
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise BadInput(f"`torchlml gpu-check` takes one file name, and `{' '.join(arguments)}` was given.")
    return Path(arguments[0] if arguments else "torchlml-gpu-check.json")
