"""Any file of labelled rows, by its name: a table, a pair of `.npz`, or lines of svmlight."""

from pathlib import Path

from torchlml_lab.data.csr_pair import read_csr_pair
from torchlml_lab.data.labelled_rows import LabelledRows, rename
from torchlml_lab.data.svmlight import read_svmlight
from torchlml_lab.data.tables import Columns, is_table, read_table
from torchlml_lab.errors import BadInput


def read_labelled(
    path: Path,
    option: str,
    *,
    columns: Columns | None = None,
    labels: Path | None = None,
    label_names: Path | None = None,
    labelled: bool = True,
) -> tuple[LabelledRows, Columns | None]:
    """Read rows with their labels.

    Args:
        path: `*.csv`, `*.tsv` and `*.parquet` are tables, `*.npz` are sparse features, and any other is
            svmlight or the extreme-classification repository's text format; text may be gzipped.
        option: The option that named it, for the sentences.
        columns: What is known of a table's columns.
        labels: The sparse labels that belong to an `.npz`.
        label_names: A file with the names of labels that are numbers.
        labelled: Whether labels are needed.

    Returns:
        The rows, and the columns of a table. What is wrong raises `BadInput`.
    """
    if labels is not None and path.suffix != ".npz":
        raise BadInput(f"`{option}-labels` is for `.npz` files, but `{option}` names `{path}`.")
    if is_table(path):
        if label_names is not None:
            raise BadInput(f"`--label-names` is for labels that are numbers, and `{path}` has names already.")
        return read_table(path, option, columns or Columns(), labelled)
    if columns is not None and columns != Columns():
        raise BadInput(f"`{path}` is no table, so it has no columns to name.")
    if path.suffix == ".npz":
        if labelled and labels is None:
            raise BadInput(
                f"`{option}` names `{path}`: give its labels, another `.npz`, by `{option}-labels`."
            )
        rows = read_csr_pair(path, option, labels, f"{option}-labels")
    else:
        rows = read_svmlight(path, option)
    return rename(rows, label_names if labelled else None, "--label-names"), None
