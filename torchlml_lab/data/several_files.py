"""Samples in several files: a list of files, a directory or a pattern, read as if they were one file."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.label_columns import listed
from torchlml_lab.data.labeled_files import declared_features, read_labeled
from torchlml_lab.data.labeled_rows import LabeledRows, label_order, rename, stacked
from torchlml_lab.data.tables import Columns, column_names, is_table

Paths = Path | tuple[Path, ...]
"""The value of an option: files, directories or patterns."""


def files_of(given: Paths, option: str) -> list[Path]:
    """List the files that an option names, in alphabetical order within a directory or a pattern.

    Args:
        given: Files, directories (all files in them), and patterns like `part-*.csv`.
        option: The option, for error messages.

    Returns:
        At least one file. A pattern without a match, an empty directory or a repeated file raises `BadInput`.
    """
    found = list[Path]()
    for path in _all(given):
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
            if not inside:
                raise BadInput(f"`{option}` names the directory `{path}`, which contains no files.")
        elif path.exists() or not glob.has_magic(str(path)):
            inside = [path]  # a missing file is reported when it is read
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            inside = [one for one in matches if one.is_file()]
            if not inside:
                raise BadInput(f"`{option}` names `{path}`, which matches no files.")
        found += inside
    if not found:
        raise BadInput(f"`{option}` must name at least one file.")
    twice = next((path for place, path in enumerate(found) if path in found[:place]), None)
    if twice is not None:
        raise BadInput(f"`{option}` names `{twice}` twice.")
    return found


def _all(given: Paths) -> tuple[Path, ...]:
    return given if isinstance(given, tuple) else (given,)


def in_words(given: Paths | None) -> str:
    """Format the value of an option for a message.

    >>> in_words(Path("a.csv")), in_words((Path("a.csv"), Path("b.csv"), Path("c.csv")))
    ('a.csv', 'a.csv and 2 more')
    """
    if given is None:
        return ""
    first, *more = _all(given) or (Path(),)
    return f"{first} and {len(more)} more" if more else str(first)


def short_name(given: Paths) -> str:
    """Return the name of the data for a table of results: the name of the first file without its suffixes."""
    return _all(given)[0].name.partition(".")[0]


def is_table_of(given: Paths, option: str) -> bool:
    """Whether the files of an option are tables, according to the name of the first one."""
    return is_table(files_of(given, option)[0])


def read_samples(
    given: Paths,
    option: str,
    *,
    columns: Columns | None = None,
    labels: Paths | None = None,
    label_names: Path | None = None,
    labeled: bool = True,
) -> tuple[LabeledRows, Columns | None]:
    """Read the samples of all files that an option names, each with `read_labeled`.

    Args:
        given: The files. All of them must have the same format and the same columns.
        option: The option that named them, for error messages.
        columns: The known roles of the columns of tables. All other roles are detected in the first file.
        labels: The files of sparse labels for `.npz` files, in the same order.
        label_names: A file with the names of numbered labels.
        labeled: Whether labels are required.

    Returns:
        The samples in the order of the files, and the columns of tables. Invalid input raises `BadInput`.
    """
    files = files_of(given, option)
    label_files: Sequence[Path | None] = [None] * len(files)
    if labels is not None:
        label_files = files_of(labels, f"{option}-labels")
        if len(label_files) != len(files):
            raise BadInput(
                f"`{option}-labels` must name as many files as `{option}`, {len(files)}, but it names "
                f"{len(label_files)}."
            )
    tables = is_table(files[0])
    if len(files) > 1:
        _check_formats(files, option, columns, labeled)
    # Numbered labels are named last, because they are first sorted by number.
    early = label_names if tables or len(files) == 1 else None
    parts = list[LabeledRows]()
    for path, its_labels in zip(files, label_files, strict=True):
        rows, columns = read_labeled(
            path, option, columns=columns, labels=its_labels, label_names=early, labeled=labeled
        )
        parts.append(rows)
    if len(parts) == 1:
        return parts[0], columns
    return rename(_joined(parts), label_names if labeled and not tables else None, "--label-names"), columns


def _check_formats(files: Sequence[Path], option: str, columns: Columns | None, labeled: bool) -> None:
    """Raise `BadInput` if files differ in their format, their columns, or their numbers of features."""
    first = files[0]
    for path in files[1:]:
        if _format(path) != _format(first):
            raise BadInput(
                f"All files of `{option}` must have the same format, but `{first}` is {_format(first)} and "
                f"`{path}` is {_format(path)}."
            )
    known = columns or Columns()
    if is_table(first) and labeled and not (known.labels and (known.texts or known.numbers)):
        usual = column_names(first, option)
        for path in files[1:]:
            names = column_names(path, option)
            if names is not None and usual is not None and set(names) != set(usual):
                missing = [name for name in usual if name not in names]
                more = [name for name in names if name not in usual]
                has, lacks = (first, path) if missing else (path, first)
                raise BadInput(
                    f"All files of `{option}` must have the same columns, but `{has}` has "
                    f"{listed(missing or more)}, and `{lacks}` does not."
                )
    if not is_table(first):
        count = declared_features(first, option)
        for path in files[1:]:
            if (other := declared_features(path, option)) != count:
                raise BadInput(
                    f"All files of `{option}` must have the same number of features, but `{first}` declares "
                    f"{count or 'no number'} and `{path}` {other or 'no number'}."
                )


def _format(path: Path) -> str:
    return "a table" if is_table(path) else "an .npz file" if path.suffix == ".npz" else "svmlight text"


def _joined(parts: list[LabeledRows]) -> LabeledRows:
    """Join samples, with the union of their labels. The list is emptied in the process, to save memory."""
    names = label_order({name for part in parts for name in part.names})
    width = max(part.features.shape[1] for part in parts)
    texts = None if parts[0].texts is None else [text for part in parts for text in part.texts or ()]
    first = parts[0]
    labels = stacked([part.with_labels(names).labels for part in parts], len(names))
    blocks = [part.features for part in parts]
    parts.clear()
    return replace(first, features=stacked(blocks, width), labels=labels, names=names, texts=texts)
