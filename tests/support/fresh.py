"""Run programs in processes that have not imported torchlml, to test imports and environment variables.

On Linux, the processes are forks of a server that has imported only torch, because importing torch takes
seconds. On other systems, each program starts a new interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c code words...` in the repository root, with only the given `TORCHLML_*` variables.

    >>> run("import sys; print(sys.argv[1], 'torchlml' in sys.modules)", "word").stdout
    'word False\\n'
    """
    settings = {key: value for key, value in os.environ.items() if not key.startswith("TORCHLML_")}
    settings |= environment
    if sys.platform != "linux":
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        exit_code = _ask(code, words, settings, str(out), str(err))
        return subprocess.CompletedProcess([code, *words], exit_code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.fresh"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes the server's input, which stops the server
    return server


def _ask(*request: object) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def _serve() -> None:
    """Read one program per line from standard input, run it in a fork, and print its exit code."""
    import torch  # noqa: F401

    gc.freeze()  # a garbage collection in a fork would copy all memory
    for request in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(*json.loads(request))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(code: str, words: list[str], settings: dict[str, str], out: str, err: str) -> NoReturn:
    os.environ.clear()
    os.environ.update(settings)
    for descriptor, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = ["-c", *words]
    exit_code = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # a normal exit takes a second once torch is imported


if __name__ == "__main__":
    _serve()
