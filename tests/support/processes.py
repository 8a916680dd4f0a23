"""Processes that tests start: forks of a server that has imported torch and the lab, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

# torch._dynamo is for the optimizers of torch.
_IMPORTED = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "tests.support.problems"]
_IMPORTED += [f"torchlml_lab.studies.{study}.sweep" for study in ("cifar100", "scene_graph")]
_IMPORTED += ["torchlml_lab.multilabel.report"]


def fork(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start `work(*arguments)`, a function of a module, in a process that need not import torch again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def restore_interrupts() -> None:
    """Undo, in a new process, what a shell does to its background jobs: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def torchlml(words: Sequence[str]) -> int:
    """The command line."""
    from torchlml_lab.cli import main

    return main(words)


def script(words: Sequence[str]) -> int:
    """A file that is run as a program."""
    runpy.run_path(words[0], run_name="__main__")
    return 0


class Command:
    """A program that runs on one thread, in a process of its own; its output goes to files."""

    def __init__(
        self,
        words: Sequence[str],
        program: Callable[[Sequence[str]], int] = torchlml,
        before: Callable[[], None] = restore_interrupts,
        **environment: str,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._process = fork(_run, program, words, before, self._folder, environment)
        self.pid = self._process.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """Send a signal to it, and to none of its children."""
        assert self.pid is not None
        os.kill(self.pid, number)

    def end(self, seconds: float = 180) -> tuple[int | None, str, str]:
        """Wait for it, and give its exit code, what it printed, and what it complained of."""
        self._process.join(seconds)
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return self._process.exitcode, out, err

    def kill(self) -> tuple[int | None, str, str]:
        """End it as the system does that runs out of memory."""
        self.send_signal(signal.SIGKILL)
        return self.end()


def _run(
    program: Callable[[Sequence[str]], int],
    words: Sequence[str],
    before: Callable[[], None],
    folder: Path,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(1)
    before()
    sys.exit(program(words))


def start(words: Sequence[str], before: Callable[[], None] = restore_interrupts) -> Command:
    """Start `torchlml` with these arguments; `before`, a function of a module, runs there first."""
    return Command(words, before=before)


def start_two(
    words: Sequence[str], program: Callable[[Sequence[str]], int] = torchlml
) -> tuple[Command, Command]:
    """Start a program in two processes that work together; `torchrun` tells them the same."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    both = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (Command(words, program, RANK=rank, LOCAL_RANK=rank, **both) for rank in ("0", "1"))
    return first, second


def output(*processes: Command, code: int = 0, seconds: float = 180) -> tuple[str, str]:
    """Wait for processes that must end in time and with this code; give their two outputs."""
    ends = [process.end(seconds) for process in processes]
    printed, errors = ("".join(end[i] for end in ends) for i in (1, 2))
    assert [end[0] for end in ends] == [code] * len(ends), errors
    return printed, errors
