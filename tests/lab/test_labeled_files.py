"""Reading labeled data: all formats give the same rows, and bad files raise clear errors."""

from __future__ import annotations

import gzip
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_svmlight_file

from torchlml_lab.bench.scale import write_samples
from torchlml_lab.bench.timing import added_bytes, measurable
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data import sparse_files, tables
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, label_matrix
from torchlml_lab.files import read_blocks
from torchlml_lab.multilabel.samples import read_labeled, read_samples

X = np.array([[0, 1.5, 0], [2, 0, -1], [0, 0, 3]], dtype=np.float32)
LABELS = [["2", "10"], [], ["2"]]
SVMLIGHT = "2,10 1:1.5\n 0:2 2:-1\n2 2:3\n"


def read(path: Path, text: str | bytes, **options) -> LabeledRows:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_labeled(path, "--train", **options)[0]


def names_of(rows: LabeledRows) -> list[list[str]]:
    return [
        [rows.names[label] for label in row]
        for row in np.split(rows.labels.indices, rows.labels.indptr[1:-1])
    ]


FORMS: dict[str, str | bytes] = {
    "svmlight": SVMLIGHT,
    "with a header": "3 3 11\n" + SVMLIGHT,
    "with comments": SVMLIGHT.replace("\n", " # a remark\r\n"),
    "with tabs": "2,10\t1:1.5\n0:2 2:-1\n2 2:3",
    "packed": gzip.compress(("3 3 11\n" + SVMLIGHT).encode()),
    "with a byte order mark": b"\xef\xbb\xbf" + SVMLIGHT.encode(),
    "with carriage returns only": SVMLIGHT.replace("\n", "\r"),
}


@pytest.mark.parametrize("form", FORMS)
def test_svmlight_with_and_without_a_header(tmp_path: Path, form: str) -> None:
    rows = read(tmp_path / "rows.txt", FORMS[form])
    assert np.array_equal(rows.features.toarray(), X)
    assert names_of(rows) == LABELS
    assert rows.names == ["2", "10"]  # sorted as numbers, not as text
    assert rows.counts.tolist() == [2, 0, 1]


def test_a_pair_of_npz(tmp_path: Path) -> None:
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(X))
    observed = np.zeros((3, 11))
    observed[0, [2, 10]] = observed[2, 2] = 1
    sparse.save_npz(tmp_path / "y.npz", sparse.csc_array(observed))
    rows, _ = read_labeled(tmp_path / "x.npz", "--train", labels=tmp_path / "y.npz")
    assert np.array_equal(rows.features.toarray(), X)
    assert names_of(rows) == LABELS
    unlabeled, _ = read_labeled(tmp_path / "x.npz", "--data", labeled=False)
    assert unlabeled.counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_tables(tmp_path: Path, ending: str) -> None:
    header, lines = (
        ["title", "size", "tags"],
        [["a, b", "1.5", "x|y "], ['say "no"\nor not', "", ""], ["Ü", "3", "y"]],
    )
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = {
            "title": [line[0] for line in lines],
            "size": [1.5, None, 3],
            "tags": [["x", "y"], [], ["y"]],
        }
        parquet.write_table(pyarrow.table(table), path)
    else:
        import csv

        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="," if ending == "csv" else "\t").writerows([header, *lines])
    rows, columns = read_labeled(path, "--train")
    assert columns == Columns(("title",), ("size",), ("tags",), "," if ending == "parquet" else "|")
    assert rows.texts == [line[0] for line in lines]
    assert np.array_equal(
        rows.features.toarray(), np.array([[1.5], [np.nan], [3]], np.float32), equal_nan=True
    )
    assert names_of(rows) == [["x", "y"], [], ["y"]]
    # Reading the same file for prediction ignores the labels.
    again, _ = read_labeled(path, "--data", columns=Columns(("title",), ("size",)), labeled=False)
    assert again.texts == rows.texts
    assert again.names == []


def test_names_of_numbered_labels(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("".join(f"label {i}\n" for i in range(11)))
    rows = read(tmp_path / "rows.txt", SVMLIGHT, label_names=names)
    assert names_of(rows) == [["label 2", "label 10"], [], ["label 2"]]
    names.write_text("a\nb\na\n")
    with pytest.raises(BadInput, match="line 3: the name `a` is also on line 1"):
        read(tmp_path / "rows.txt", SVMLIGHT, label_names=names)
    names.write_text("a\nb\nc\n")
    with pytest.raises(BadInput, match="for labels 0 to 2, and a sample has the label `10`"):
        read(tmp_path / "rows.txt", SVMLIGHT, label_names=names)


def test_new_labels_come_after_known_labels() -> None:
    matrix, names = label_matrix([["b", "new"], ["a"]])
    rows = LabeledRows(sparse.csr_array((2, 0)), matrix, names).with_labels(["a", "unused", "b"])
    assert rows.names == ["a", "unused", "b", "new"]
    assert rows.labels.toarray().tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]


BAD_LINES = {
    "1 2:x": "line 1: the value in `2:x` is not a finite number in float32",
    "1 2:nan": "line 1: the value in `2:nan` is not a finite number in float32",
    "1 2:1e99": "line 1: the value in `2:1e99` is not a finite number in float32",
    "1 2:1\n1 a:1": "line 2: the feature in `a:1` is not an integer",
    "1 -2:1": "line 1: the feature in `-2:1` is not an integer",
    "1 2:1 3": "line 1: `3` is not of the form `feature:value`",
    "1 2:1:4 3": "line 1: the value in `2:1:4` is not",
    "1 2:": "line 1: the value in `2:` is not",
    "1 1:2 1:3": "line 1: feature 1 occurs twice",
    "1,,2 2:1": "line 1: `1,,2` contains an empty label",
    "3 5 5\n1 1:1\n2 2:1": "line 3: the file ends after 2 rows, but its first line declares 3",
    "1 5 5\n1 5:1": "line 2: feature 5 is out of range, because the first line declares 5 features, from 0",
    "1 5 5\n5 1:1": "line 2: label `5` must be an integer from 0 to 4, because the first line declares 5",
    "1 5 5\n² 1:1": "line 2: label `²` must be an integer from 0 to 4, because the first line declares 5",
    "1 99999999999 5\n1 1:1": "at most 2147483648 features are supported, but 99999999999 are declared",
    "": "is empty",
    "  \n \n": "is empty",
}

BAD_TABLES = {
    "text,tags\na,x\nb": "line 3: the number of cells is 1, but line 1 has 2",
    'text,tags\na,x\n"b,y\n\n': "line 3: the file ends inside quotes",
    'text,tags\na,x\n"b"c,y\n': "line 3: the line cannot be parsed (',' expected after",
    "text,text,tags\na,b,c": "line 1: there are two columns called `text`",
    "text,theme\na,b": "has no column called labels, label, tags or similar. Choose a column with `--labels`",
    "tags\na": "has no columns other than the labels (`tags`)",
    "text,tags\n": "has columns but no rows",
    "size,tags\n1,x\nnan,y": "line 3: column `size` has `nan`, which is not a finite number in float32 (for",
    "size,tags\n1,x\n-inf,y": "line 3: column `size` has `-inf`, which is not a finite number in float32.",
    "size,tags\n1,x\n1e99,y": "line 3: column `size` has `1e99`, which is not a finite number in float32.",
    "": "is empty",
}
BAD_FILES = [("rows.txt", *one) for one in BAD_LINES.items()]
BAD_FILES += [("rows.csv", *one) for one in BAD_TABLES.items()]


@pytest.mark.parametrize(("name", "text", "needle"), BAD_FILES)
def test_bad_files(tmp_path: Path, name: str, text: str, needle: str) -> None:
    with pytest.raises(BadInput) as said:
        read(tmp_path / name, text)
    assert needle in str(said.value)
    assert str(tmp_path / name) in str(said.value)


def test_bad_columns(tmp_path: Path) -> None:
    good = 'title,size,tags\n"a\nb",1,x\nc,2 cm,y\n'
    for columns, needle in (
        (Columns(("titel",)), "has no column `titel`. Did you mean `title`?"),
        (Columns(numbers=("size",)), "line 4: column `size` has `2 cm`, which is not a finite number"),
        (Columns(labels=("topic",)), "has no column `topic`. Its columns are `title`, `size`, `tags`."),
        (Columns(("tags", "title")), "the column `tags` contains the labels"),
    ):
        with pytest.raises(BadInput) as said:
            read(tmp_path / "rows.csv", good, columns=columns)
        assert needle in str(said.value)


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv", "rows.npz", "rows.parquet"])
def test_files_of_the_wrong_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be read: no such file"):
        read_labeled(tmp_path / name, "--train", labels=tmp_path / name if name.endswith("npz") else None)
    binary = name.endswith(("npz", "parquet"))
    bad: dict[bytes, str] = {
        gzip.compress(SVMLIGHT.encode() * 99)[:-20]: "not a complete" if binary else "it is truncated",
        b"PK\x03\x04 and not more": "not a complete" if binary else "",
    }
    if not binary:
        bad |= {
            b"text,tags\na,\xe4\n": "line 2: the text is not UTF-8",
            b"text,tags\na\0,b": "line 2: the line contains a zero byte",
        }
    for content, needle in bad.items():
        with pytest.raises(BadInput) as said:
            read(tmp_path / name, content, labels=tmp_path / name if name.endswith("npz") else None)
        assert needle in str(said.value)


def test_parquet_with_two_columns_of_the_same_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array(["a", "b"])
    parquet.write_table(pyarrow.table([column] * 3, ["text", "text", "tags"]), tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"rows.parquet`: there are two columns called `text`"):
        read_labeled(tmp_path / "rows.parquet", "--train")


def test_bad_npz(tmp_path: Path) -> None:
    x, y = tmp_path / "x.npz", tmp_path / "y.npz"
    sparse.save_npz(x, sparse.csr_array(X))
    with pytest.raises(BadInput, match=r"Pass a second `.npz` file with the labels as `--train-labels`"):
        read_labeled(x, "--train")
    sparse.save_npz(y, sparse.csr_array(np.ones((2, 4))))
    with pytest.raises(BadInput, match=r"has 3 rows, but .* has 2"):
        read_labeled(x, "--train", labels=y)
    sparse.save_npz(x, sparse.csr_array(np.array([[0.0, 1], [np.inf, 0]])))
    with pytest.raises(BadInput, match="row 1: a feature is not a finite number in float32"):
        read_labeled(x, "--train", labels=y)
    sparse.save_npz(x, sparse.csr_array(X))
    for wrong in (-1.0, np.nan):
        observed = np.zeros((len(X), 2))
        observed[0, 1], observed[1, 0] = 1, wrong
        sparse.save_npz(y, sparse.csr_array(observed))
        with pytest.raises(
            BadInput, match=rf"y.npz`, row 1: an entry is {wrong:g}, but entries must be positive"
        ):
            read_labeled(x, "--train", labels=y)
    for form in (sparse.csr_array, sparse.csc_array):
        sparse.save_npz(x, form(X))
        parts = dict(np.load(x))
        np.savez(x, **{**parts, "indices": parts["indices"] + 1000})
        with pytest.raises(BadInput, match=r"not a complete file written by `scipy.sparse.save_npz`"):
            read_labeled(x, "--train", labels=y)
    np.savez(x, a=np.ones(3))
    with pytest.raises(BadInput, match=r"not a complete file written by `scipy.sparse.save_npz`"):
        read_labeled(x, "--train", labels=y)


@pytest.mark.skipif("TORCHLML_DATA" not in os.environ, reason="TORCHLML_DATA is not set")
def test_delicious_is_read_quickly_and_matches_scikit_learn() -> None:
    path = Path(os.environ["TORCHLML_DATA"]) / "multilabel" / "delicious.train.svm.gz"
    started = time.process_time()
    rows, _ = read_labeled(path, "--train")
    assert time.process_time() - started < 3
    x, y = load_svmlight_file(path, multilabel=True, zero_based=True)
    assert (abs(x - rows.features)).max() == 0
    assert names_of(rows) == [[str(int(label)) for label in sorted(row)] for row in y]


def test_underscores_are_not_digits(tmp_path: Path) -> None:
    """Python parses `1_23` as 123, but here it is text in a table and an error in svmlight format."""
    rows = read(tmp_path / "rows.csv", "code,size,tags\n1_23,1,a\n12_3,2,b\n")
    assert rows.texts == ["1_23", "12_3"]
    assert rows.columns == ("size",)
    with pytest.raises(BadInput, match=r"rows.csv`, line 2: column `code` has `1_23`"):
        read(tmp_path / "rows.csv", "code,tags\n1_23,a\n", columns=Columns(numbers=("code",)))
    with pytest.raises(BadInput, match=r"line 2: the feature in `1_0:25` is not"):
        read(tmp_path / "rows.txt", "1 1:2\n1 1_0:25\n")
    with pytest.raises(BadInput, match=r"line 1: the value in `10:2_5` is not a finite number in float32"):
        read(tmp_path / "rows.txt", "1 10:2_5\n")


def test_nulls_in_parquet_are_not_labels(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    lists = pyarrow.array([["a", None, "b"], [None], None, ["None"]], pyarrow.list_(pyarrow.string()))
    parquet.write_table(pyarrow.table({"text": ["p", "q", "r", "s"], "tags": lists}), path)
    assert names_of(read_labeled(path, "--train")[0]) == [["a", "b"], [], [], ["None"]]
    numbers = pyarrow.array([[1.5, float("nan"), None], [2.5]], pyarrow.list_(pyarrow.float64()))
    parquet.write_table(pyarrow.table({"text": ["p", "q"], "tags": numbers}), path)
    assert names_of(read_labeled(path, "--train")[0]) == [["1.5"], ["2.5"]]
    parquet.write_table(pyarrow.table({"text": ["p", "q"], "tags": [float("nan"), 2.5]}), path)
    assert names_of(read_labeled(path, "--train")[0]) == [[], ["2.5"]]


SEPARATED = {
    "semicolons": 'text;size;tags\n"one; two";1;a,b\nthree, four;2;b\n',
    "tabs": "text\tsize\ttags\none; two\t1\ta,b\nthree, four\t2\tb\n",
    "commas": 'text,size,tags\none; two,1,"a,b"\n"three, four",2,b\n',
}


@pytest.mark.parametrize("form", SEPARATED)
def test_csv_with_any_common_separator(tmp_path: Path, form: str) -> None:
    rows = read(tmp_path / "rows.csv", SEPARATED[form])
    assert rows.texts == ["one; two", "three, four"]
    assert rows.features.toarray().tolist() == [[1], [2]]
    assert names_of(rows) == [["a", "b"], ["b"]]


def test_the_separator_of_a_csv_must_fit_its_rows(tmp_path: Path) -> None:
    rows = read(tmp_path / "rows.csv", "a;b;c,tags\none,p\ntwo,q\n")
    assert rows.texts == ["one", "two"]
    # A file for prediction may have a single column with quoted texts that contain commas and semicolons.
    path = tmp_path / "one.csv"
    path.write_text('text\n"one; two, three"\nfour\n')
    columns = Columns(texts=("text",))
    assert read_labeled(path, "--data", columns=columns, labeled=False)[0].texts == [
        "one; two, three",
        "four",
    ]
    with pytest.raises(BadInput, match=r"line 3: the number of cells is 1, but line 1 has 2"):
        read(tmp_path / "rows.csv", "text;tags\none;p\ntwo\n")


TOPICS = [["grain", "wheat"], ["oil"], ["grain"], ["oil", "gas"], ["gas"], ["wheat"]]
PROSE = [
    f"Prices rose, according to {name}; nobody knows why."
    for name in ("Ann", "Ben", "Cem", "Dan", "Eva", "Fay")
]


def table(path: Path, header: list[str], rows: list[tuple], delimiter: str = ",") -> Path:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


@pytest.mark.parametrize("name", ["topics", "Sachgebiete", "x y"])
@pytest.mark.parametrize("mark", [",", ";", "|"])
def test_a_column_of_separated_names_is_recognized(tmp_path: Path, name: str, mark: str) -> None:
    rows = [(text, mark.join(topics)) for text, topics in zip(PROSE, TOPICS, strict=True)]
    found, columns = read_labeled(table(tmp_path / "a.csv", ["body", name], rows), "--train")
    assert columns == Columns(("body",), (), (name,), mark)
    assert [sorted(row) for row in names_of(found)] == [sorted(row) for row in TOPICS]


def test_common_column_names_take_precedence_over_guesses(tmp_path: Path) -> None:
    rows = [
        (text, ";".join(topics), "sport" if i % 2 else "news", "a")
        for i, (text, topics) in enumerate(zip(PROSE, TOPICS, strict=True))
    ]
    path = table(tmp_path / "a.csv", ["body", "authors", "category", "tags"], rows)
    _, columns = read_labeled(path, "--train")
    assert columns is not None
    assert columns.labels == ("tags",)
    # If the user chooses `tags` as an input, the labels come from another column with a typical name.
    _, columns = read_labeled(path, "--train", columns=Columns(texts=("body", "tags")))
    assert columns is not None
    assert columns.labels == ("category",)


def test_prose_and_decimal_commas_are_not_labels(tmp_path: Path) -> None:
    rows = [(text, f"{1 + i % 2},5{i % 3}") for i, text in enumerate(PROSE)]
    path = table(tmp_path / "a.csv", ["body", "price"], rows, ";")
    with pytest.raises(
        BadInput, match=r"has no column called labels, label, tags or similar. Choose a column"
    ):
        read_labeled(path, "--train")


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", ["body", "tags"], [("x", "y")])
    (tmp_path / "b.csv").write_text('"body"x,tags\n')
    with pytest.raises(BadInput, match=r"b\.csv`, line 1: the line cannot be parsed"):
        read_samples((tmp_path / "a.csv", tmp_path / "b.csv"), "--train")


TOXIC = ["id", "comment_text", "toxic", "severe", "insult"]
COMMENTS = [("a1", "you fool", "1", "0", "1"), ("b2", "thanks", "0", "0", "0"), ("c3", "argh", "1", "1", "0")]


@pytest.mark.parametrize("form", ["0 and 1", "false and true", "decimals"])
def test_a_column_for_each_label(tmp_path: Path, form: str) -> None:
    said = {"0 and 1": "0 1", "false and true": "False TRUE", "decimals": "0.0 1.0"}[form].split()
    rows = [(*row[:2], *(said[int(flag)] for flag in row[2:])) for row in COMMENTS]
    path = table(tmp_path / "a.csv", TOXIC, rows)
    found, columns = read_labeled(path, "--train")
    assert columns == Columns(("comment_text",), (), ("toxic", "severe", "insult"), None)
    assert str(columns).endswith("3 labels, each in a column of 0s and 1s: `toxic`, `severe`, `insult`")
    assert [sorted(row) for row in names_of(found)] == [["insult", "toxic"], [], ["severe", "toxic"]]
    # The user may also choose the label columns. An empty cell counts as 0.
    empty = [tuple("" if cell == said[0] else cell for cell in row) for row in rows]
    table(path, TOXIC, empty)
    chosen = Columns(("comment_text",), labels=("severe", "toxic"))
    assert [sorted(row) for row in names_of(read_labeled(path, "--train", columns=chosen)[0])] == [
        ["toxic"],
        [],
        ["severe", "toxic"],
    ]
    table(path, TOXIC, [*rows, ("d4", "hm", "-1", "0", "0")])
    with pytest.raises(BadInput, match="line 5: column `toxic` has `-1`, but with several label columns"):
        read_labeled(path, "--train", columns=Columns(labels=("toxic", "severe")))


def test_the_error_for_an_ambiguous_table_suggests_a_command(tmp_path: Path) -> None:
    binary = [(i, i % 2, (i // 2) % 2) for i in range(2, 8)]
    path = table(tmp_path / "a.csv", ["size", "hot", "too cold"], binary)
    with pytest.raises(BadInput) as said:
        read_labeled(path, "--train")
    command = f"torchlml train multilabel --train {path} --labels hot 'too cold'"
    assert (
        f"2 columns contain only 0s and 1s (`hot`, `too cold`). If each of them is a label, run `{command}`."
        in str(said.value)
    )
    table(path, ["size", "hot", "too cold"], [*binary, ("", 0, 1)])  # an empty cell is not a text
    with pytest.raises(BadInput, match="If each of them is a label, run"):
        read_labeled(path, "--train")
    two = [(text, ";".join(topics), ";".join(topics)) for text, topics in zip(PROSE, TOPICS, strict=True)]
    with pytest.raises(BadInput) as said:
        read_labeled(table(path, ["body", "authors", "fields"], two), "--train")
    assert (
        "several columns look like labels (`authors`, `fields`). If the labels are in `authors`, run"
        in str(said.value)
    )
    assert str(said.value).endswith(f"run `torchlml train multilabel --train {path} --labels authors`.")
    one = [(text, "grain" if i % 2 else "crude oil") for i, text in enumerate(PROSE)]
    with pytest.raises(BadInput, match=r"If the labels are in `field`, run `torchlml .* --labels field`\."):
        read_labeled(table(path, ["body", "field"], one), "--train")


def test_columns_that_number_the_samples_are_not_inputs(tmp_path: Path) -> None:
    rows = [(i, f"n{i}", text, 7, "x") for i, text in enumerate(PROSE)]
    path = table(tmp_path / "a.csv", ["", "doc_id", "body", "group_id", "tags"], rows)
    _, columns = read_labeled(path, "--train")
    assert columns == Columns(("body",), ("group_id",), ("tags",), ",")
    # If a table has no other columns, a column that numbers the samples is used as an input.
    _, columns = read_labeled(table(path, ["id", "tags"], [(1, "x"), (2, "y")]), "--train")
    assert columns == Columns((), ("id",), ("tags",), ",")


def test_lists_printed_by_python_are_read_as_lists(tmp_path: Path) -> None:
    rows = [(text, repr(topics)) for text, topics in zip(PROSE, TOPICS, strict=True)]
    path = table(tmp_path / "a.csv", ["body", "terms"], [*rows, ("nothing", ""), ("also", "[]")])
    assert [sorted(row) for row in names_of(read_labeled(path, "--train")[0])] == [
        *map(sorted, TOPICS),
        [],
        [],
    ]
    # If any cell is not a printed list, the brackets are part of the names.
    table(path, ["body", "tags"], [("a", "[x]"), ("b", "y")])
    assert names_of(read_labeled(path, "--train")[0]) == [["[x]"], ["y"]]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz"])
def test_json_lines(tmp_path: Path, ending: str) -> None:
    text = (
        '{"text": "a, \\u00dc", "size": 1.5, "topics": ["x", "y", null], "more": {"a": 1}}\n'
        '{"size": null, "text": "b", "topics": [], "more": {"a": 2}}\n\n'
        '{"text": "c", "size": 3, "topics": ["y"]}\n'
    )
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    rows, columns = read_labeled(path, "--train")
    assert columns == Columns(("text",), ("size",), ("topics",), ",")
    assert rows.texts == ["a, Ü", "b", "c"]
    assert np.array_equal(
        rows.features.toarray(), np.array([[1.5], [np.nan], [3]], np.float32), equal_nan=True
    )
    assert names_of(rows) == [["x", "y"], [], ["y"]]
    with pytest.raises(
        BadInput, match="line 1: column `more` must contain labels, but it contains an object"
    ):
        read_labeled(path, "--train", columns=Columns(labels=("more",)))


BAD_JSON = {
    '{"text": "a"}\n{"text": ': "line 2: the line is not valid JSON",
    '{"text": "a"}\n[1, 2]': "line 2: the line is not a JSON object (`{...}`)",
    '{"text": "\\ud83d", "tags": "x"}': "line 1: the text is not valid Unicode",
    '{"size": 1, "tags": "x"}\n{"size": 1' + 400 * "0" + ', "tags": "y"}': "not a finite number in float32",
    "{}\n{}": "has no column called labels",
}


@pytest.mark.parametrize("text", BAD_JSON)
def test_bad_json_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    columns = Columns(numbers=("size",)) if "size" in text else None
    with pytest.raises(BadInput) as said:
        read_labeled(path, "--train", columns=columns)
    assert BAD_JSON[text] in str(said.value)
    assert str(path) in str(said.value)


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files in blocks of a few bytes, so that lines span several blocks."""
    for module in (sparse_files, tables):
        monkeypatch.setattr(module, "read_blocks", partial(read_blocks, size=7))


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("form", FORMS)
def test_the_block_size_does_not_change_samples(tmp_path: Path, form: str) -> None:
    test_svmlight_with_and_without_a_header(tmp_path, form)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_the_block_size_does_not_change_tables(tmp_path: Path, ending: str) -> None:
    test_tables(tmp_path, ending)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(("name", "text", "needle"), BAD_FILES)
def test_the_block_size_does_not_change_errors(tmp_path: Path, name: str, text: str, needle: str) -> None:
    test_bad_files(tmp_path, name, text, needle)


@pytest.mark.usefixtures("tiny_blocks")
def test_json_lines_in_blocks(tmp_path: Path) -> None:
    lines = ['{"text": "one", "tags": ["a"]}', "", '{"tags": ["b", "a"], "size": 2, "text": "two"}']
    rows, columns = read_labeled_text(tmp_path / "rows.jsonl", "\n".join(lines) + "\n")
    assert columns == Columns(("text",), ("size",), ("tags",), ",")
    assert rows.texts == ["one", "two"]
    assert np.array_equal(rows.features.toarray(), [[np.nan], [2]], equal_nan=True)
    assert names_of(rows) == [["a"], ["a", "b"]]


def read_labeled_text(path: Path, text: str) -> tuple[LabeledRows, Columns | None]:
    path.write_text(text)
    return read_labeled(path, "--train")


@pytest.mark.skipif(not measurable(), reason="measuring memory requires Linux with the GNU C library")
def test_reading_needs_less_memory_than_three_times_the_file_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_files, "read_blocks", partial(read_blocks, size=2**16))
    path = tmp_path / "rows.svm"
    write_samples(path, 30_000, 1000, 10_000)
    assert added_bytes(lambda: read_labeled(path, "--train")) < 3 * path.stat().st_size


def parts(folder: Path, *texts: str, ending: str = "csv") -> Path:
    """Write a data set as several files to a directory, together with a hidden file that must be ignored."""
    folder.mkdir()
    (folder / ".hidden").write_bytes(b"\0")
    for number, text in enumerate(texts):
        (folder / f"part-{number}.{ending}").write_text(text)
    return folder


WHOLE = 'text,size,tags\n"one, two",1,11;10\nthree,2,10\nfour,3,9\nfive,,10;11\n'
HALVES = ('text,size,tags\n"one, two",1,11;10\nthree,2,10\n', "tags,text,size\n9,four,3\n10;11,five,\n")


@pytest.mark.parametrize("named", ["directory", "pattern", "files"])
def test_several_tables_are_read_as_one(tmp_path: Path, named: str) -> None:
    folder = parts(tmp_path / "parts", *HALVES)
    files = (folder / "part-0.csv", folder / "part-1.csv")
    given = {"directory": folder, "pattern": folder / "part-?.csv", "files": files}[named]
    rows, columns = read_samples(given, "--train")
    whole, same = read_labeled_text(tmp_path / "whole.csv", WHOLE)
    assert columns == same
    assert (rows.texts, rows.names, rows.columns) == (whole.texts, whole.names, whole.columns)
    assert rows.names == ["9", "10", "11"]
    assert np.array_equal(rows.labels.toarray(), whole.labels.toarray())
    assert np.array_equal(rows.features.toarray(), whole.features.toarray(), equal_nan=True)


def test_several_sparse_files_are_read_as_one(tmp_path: Path) -> None:
    lines = SVMLIGHT.splitlines(keepends=True)
    names = tmp_path / "names.txt"
    names.write_text("".join(f"label {10 - i}\n" for i in range(11)))
    rows, _ = read_samples(parts(tmp_path / "text", *lines, ending="svm"), "--train", label_names=names)
    assert np.array_equal(rows.features.toarray(), X)
    assert rows.names == ["label 8", "label 0"]  # for the label numbers 2 and 10
    assert names_of(rows) == [["label 8", "label 0"], [], ["label 8"]]
    for name, matrix in (("x", np.asarray(X)), ("y", np.eye(3))):
        for number, part in enumerate((matrix[:1], matrix[1:])):
            sparse.save_npz(tmp_path / f"{name}-{number}.npz", sparse.csr_array(part))
    rows, _ = read_samples(tmp_path / "x-*.npz", "--train", labels=tmp_path / "y-*.npz")
    assert np.array_equal(rows.features.toarray(), X)
    assert names_of(rows) == [["0"], ["1"], ["2"]]
    with pytest.raises(
        BadInput, match=r"`--train-labels` must contain as many files as `--train` \(2\), but"
    ):
        read_samples(tmp_path / "x-*.npz", "--train", labels=tmp_path / "y-1.npz")


def test_incompatible_files_are_rejected(tmp_path: Path) -> None:
    cases = {
        "all formats": (
            {"a.csv": WHOLE, "b.svm": SVMLIGHT},
            "a.csv` is a table and .*b.svm` is svmlight text",
        ),
        "fewer": (
            {"a.csv": WHOLE, "b.csv": "text,tags\nsix,9\n"},
            "a.csv` has `size`, and .*b.csv` does not",
        ),
        "more": ({"a.csv": "text,tags\nsix,9\n", "b.csv": WHOLE}, "b.csv` has `size`, and .*a.csv` does not"),
        "headers": (
            {"a.txt": "1 3 9\n1 2:1\n", "b.txt": "1 4 9\n1 2:1\n"},
            "same number of features, but .*a.txt` declares 3 and .*b.txt` declares 4",
        ),
        "no matches": ({"a.txt": SVMLIGHT}, r"\*.csv` \(`--train`\) matches no files"),
        "empty": ({}, r"The directory .* \(`--train`\) contains no files"),
    }
    for name, (files, needle) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        with pytest.raises(BadInput, match=needle):
            read_samples(folder / "*.csv" if name == "no matches" else folder, "--train")
    (tmp_path / "a.csv").write_text(WHOLE)
    with pytest.raises(BadInput, match=r"`--train` contains .*a.csv` twice"):
        read_samples((tmp_path / "a.csv", tmp_path / "a.csv"), "--train")
    # Columns that the user did not choose may differ between files.
    (tmp_path / "b.csv").write_text("text,tags\nsix,9\n")
    chosen = Columns(("text",), (), ("tags",))
    rows, _ = read_samples((tmp_path / "a.csv", tmp_path / "b.csv"), "--train", columns=chosen)
    assert rows.texts == ["one, two", "three", "four", "five", "six"]
