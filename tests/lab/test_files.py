"""Unwritable paths are rejected, and the error for a full disk names the results that were kept."""

import pytest

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import check_file, check_folder, writing


def test_checking_a_writable_path_creates_nothing(tmp_path):
    check_folder("--out", tmp_path / "a" / "b")
    check_file("--csv", tmp_path / "a" / "b.csv")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_paths_are_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(BadInput, match=rf"`{place}` \(`--out`\) cannot be written: not a dir"):
            check_folder("--out", place)
        with pytest.raises(BadInput, match=rf"`{place}` \(`--csv`\) cannot be written: "):
            check_file("--csv", place)
    with pytest.raises(BadInput, match=r"`--out` must be a directory, but .* is a file"):
        check_folder("--out", tmp_path / "file")
    with pytest.raises(BadInput, match=r"`--csv` must be a file, but .* is a directory"):
        check_file("--csv", tmp_path)


def test_a_full_disk_error_names_the_kept_results(tmp_path):
    with pytest.raises(RuntimeError, match="there is no space left on the disk, but the rows are above"):  # noqa: SIM117
        with writing("The table", tmp_path / "x", "the rows are above"):
            raise OSError(28, "No space left on device")
