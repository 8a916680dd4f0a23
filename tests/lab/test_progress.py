"""Progress bars print plain lines if there is no terminal, and thread counts are restored."""

import io
import re

import pytest
import torch
from rich.console import Console

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar
from torchlml_lab.engine.settings import check_threads, cores, use_threads


def shown(monkeypatch, terminal, seconds_per_step, steps=20, hidden=False):
    now = [0.0]
    monkeypatch.setattr("torchlml_lab.engine.output.time.monotonic", lambda: now[0])
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    with ProgressBar(console, hidden=hidden) as bar:
        monkeypatch.setattr(bar, "get_time", lambda: now[0])
        task = bar.add_task("batches", total=100)
        for _ in range(steps):
            now[0] += seconds_per_step
            bar.advance(task)
        bar.refresh()
    return written.getvalue()


def test_a_terminal_shows_the_time_left(monkeypatch):
    said = shown(monkeypatch, True, 1.0)
    assert "20/100" in said
    assert "0:00:20 elapsed, 0:01:20 left" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)


def test_without_a_terminal_lines_become_less_frequent(monkeypatch):
    lines = shown(monkeypatch, False, 3.0, steps=60).splitlines()
    # The first line is printed after 6 s. The intervals between lines are then at least 10, 20, 40 and 60 s.
    done = [int(line.split()[1]) for line in lines]
    assert done == [2, 6, 13, 27, 47]
    assert lines[0] == "batches 2 of 100, 0:04:54 left"


def test_short_work_and_hidden_processes_print_nothing(monkeypatch):
    assert shown(monkeypatch, False, 0.1) == ""
    assert shown(monkeypatch, False, 30.0, hidden=True) == ""


def test_the_thread_count_is_restored():
    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_invalid_thread_counts():
    check_threads(cores())
    for threads in (0, cores() + 1):
        with pytest.raises(BadInput, match=rf"`--threads` must be from 1 to {cores()} .*but it is {threads}"):
            check_threads(threads)
