"""The number of files that `torchlml train multilabel` passes through, counted by `tools/count_hops.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.count_hops import hops, training_calls

# A commit that raises a limit must explain why in its message.
LIMITS = {"train multilabel, CSV": 18, "train multilabel, svmlight": 18}


@pytest.mark.parametrize("name", LIMITS)
def test_files_of_a_training_run(tmp_path: Path, name: str) -> None:
    files = {file for file, _ in hops(training_calls(tmp_path)[name], "torchlml_lab")}
    assert len(files) <= LIMITS[name], sorted(files)


def test_every_counted_call_has_a_limit(tmp_path: Path) -> None:
    assert set(LIMITS) == set(training_calls(tmp_path))
