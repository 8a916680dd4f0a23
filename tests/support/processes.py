"""What tests need to know about processes they start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """Undo, in a new process, what a shell does to its background jobs: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
