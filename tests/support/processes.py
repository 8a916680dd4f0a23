"""Start processes quickly, as forks of a server that has already imported torch and other modules."""

from __future__ import annotations

import gc
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

# Modules that the server imports. PyTorch's optimizers import the first one.
_IMPORTED = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "tests.support.problems"]
_IMPORTED += [f"torchlml_lab.studies.{study}.sweep" for study in ("cifar100", "scene_graph")]
_IMPORTED += ["torchlml_lab.multilabel.report"]


def fork(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call the module-level function `work` in a new process that does not need to import torch again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def restore_interrupts() -> None:
    """Enable Ctrl-C in a new process, because children of a shell's background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def torchlml(words: Sequence[str]) -> int:
    """Run the `torchlml` command."""
    from torchlml_lab.cli import main

    return main(words)


def script(words: Sequence[str]) -> int:
    """Run a Python file as a program."""
    runpy.run_path(words[0], run_name="__main__")
    return 0


class Command:
    """A single-threaded program in its own process, with output redirected to files."""

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
        """Whether the process is still running."""
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process only, not to its children."""
        assert self.pid is not None
        os.kill(self.pid, number)

    def end(self, seconds: float = 180) -> tuple[int | None, str, str]:
        """Wait until the process ends, and return its exit code, standard output and standard error."""
        self._process.join(seconds)
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return self._process.exitcode, out, err

    def kill(self) -> tuple[int | None, str, str]:
        """Kill the process, as the system does when it runs out of memory."""
        self.send_signal(signal.SIGKILL)
        return self.end()


def _run(
    program: Callable[[Sequence[str]], int],
    words: Sequence[str],
    before: Callable[[], None],
    folder: Path,
    environment: dict[str, str],
) -> None:
    gc.freeze()  # every training run triggers garbage collection, which would copy the server's memory
    os.environ.update(environment)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(1)
    before()
    sys.exit(program(words))


def start(words: Sequence[str], before: Callable[[], None] = restore_interrupts) -> Command:
    """Start `torchlml` with these arguments. The process first calls the module-level function `before`."""
    return Command(words, before=before)


def start_two(
    words: Sequence[str], program: Callable[[Sequence[str]], int] = torchlml
) -> tuple[Command, Command]:
    """Start a program in two cooperating processes, with the environment that `torchrun` would set."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    both = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (Command(words, program, RANK=rank, LOCAL_RANK=rank, **both) for rank in ("0", "1"))
    return first, second


def output(*processes: Command, code: int = 0, seconds: float = 180) -> tuple[str, str]:
    """Wait for the processes, check their exit codes, and return their output and errors."""
    ends = [process.end(seconds) for process in processes]
    printed, errors = ("".join(end[i] for end in ends) for i in (1, 2))
    assert [end[0] for end in ends] == [code] * len(ends), errors
    return printed, errors
