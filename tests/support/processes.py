"""Processes that tests start: the command line, in one process or two, and what it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def hear_interrupts() -> None:
    """Undo, in a new process, what a shell does to its background jobs: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(arguments: Sequence[str], module: str = "torchlml", **options: Any) -> subprocess.Popen[str]:
    """Start `torchlml` with these arguments, or another module, on one thread; it can be interrupted."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        **{"preexec_fn": hear_interrupts, **options},
    )


def output(process: subprocess.Popen[str], code: int = 0, seconds: float = 180) -> tuple[str, str]:
    """Wait for a process that must end in time and with this code; give what it printed and complained of."""
    printed, errors = process.communicate(timeout=seconds)
    assert process.returncode == code, errors
    return printed, errors


def start_two(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start `torchlml` in two processes that train together."""
    launch = ["--standalone", "--nproc-per-node", "2", "-m", "torchlml"]
    return start([*launch, *arguments], module="torch.distributed.run")
