"""Files of user–item pairs: supported formats, and one-sentence errors for bad files."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import pytest

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import align, read_interactions

LINES = "ann  apple pear\nbob\nçelik apple\tfig\r\n\nann kiwi apple\n"
CSV = "when,user,item\n1,ann,apple\n2,ann,pear\n3,çelik,apple\n4,çelik,fig\n5,ann,kiwi\n6,ann,apple\n"
FILES = {
    "a.txt": LINES,
    "a.csv": CSV,
    "b.csv": CSV.replace(",", ";"),
    "a.tsv": CSV.replace(",", "\t"),
    "c.csv": "\ufeff" + CSV.replace(",ann,", ',"ann",').replace("\n", "\r\n"),
    "a.inter": CSV.replace(",", "\t").replace(
        "when\tuser\titem", "timestamp:float\tuser_id:token\titem_id:token"
    ),
}


def names(have):
    return {user: [have.items[i] for i in have.of(place)] for place, user in enumerate(have.users)}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_file_is_read_with_its_names(tmp_path, name, packed):
    path = tmp_path / (name + ".gz" * packed)
    data = FILES[name].encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    have = read_interactions(path, "--train")
    expected = {"ann": ["apple", "pear", "kiwi"], "çelik": ["apple", "fig"]}
    assert {user: items for user, items in names(have).items() if items} == expected
    assert have.repeated == 1
    assert ("bob" in have.users) == (name == "a.txt")
    assert have.counts.sum() == len(have) == 5
    assert [have.users[u] for u in have.user] == ["ann"] * 3 + ["çelik"] * 2


def test_columns_are_chosen_by_name(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating\n1,31,2.5\n1,29,3\n")
    assert names(read_interactions(path, "--train", ("userId", "movieId"))) == {"1": ["31", "29"]}
    assert names(read_interactions(path, "--train", ("rating", "movieId"))) == {"2.5": ["31"], "3": ["29"]}


WRONG = {
    "empty.txt": (b"", "`{}` (`--train`) is empty."),
    "empty.csv": (b" \n", "`{}` (`--train`) is empty."),
    "header.csv": (b"user,item\n", "`{}` has a header, but no user-item pairs."),
    "only-users.txt": (
        b"ann\nbob\n",
        "`{}` (`--train`) contains no user-item pairs. Pass a .csv",
    ),
    "commas.txt": (
        b"ann,fig\nbob,fig\n",
        "`{}` (`--train`) contains no user-item pairs. Pass a",
    ),
    "pairs.jsonl": (
        b'{"user": 1, "item": 2}',
        "`{}` (`--train`) cannot be read: .jsonl files are not supported. Pass a .csv, .tsv or",
    ),
    "latin.txt": ("ann apple\nbjörn fig\n".encode("latin-1"), "`{}`, line 2: the text is not UTF-8."),
    "binary.txt": (
        b"ann apple\n\0\1\n",
        "`{}`, line 2: the line contains a zero byte, so this is not a text file.",
    ),
    "half.txt.gz": (
        gzip.compress(LINES.encode())[:-9],
        "`{}` (`--train`) cannot be read: it is truncated",
    ),
    "damaged.txt.gz": (b"\x1f\x8b" + b"x" * 30, "`{}` (`--train`) cannot be read: its gzip data"),
    "short.csv": (CSV[:-8].encode(), "`{}`, line 7: the line has 2 fields (`6,an`), but the header has 3."),
    "no-item.csv": (b"user,item\nann,\n", "`{}`, line 2: the item is empty."),
    "no-user.csv": (b"user,item\nann,fig\n,fig\n", "`{}`, line 3: the user is empty."),
    "quote.csv": (b'user,item\nann,"fig\nbob,kiwi\n', "`{}`, line 3: the line cannot be parsed ("),
    "headless.csv": (b"1,31\n1,29\n", "`{}`, line 1: no column is called `user`, `user_id` or similar."),
    "twice.csv": (b"user,user_id,item\n1,1,2\n", "`{}`, line 1: more than one column is called `user`,"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_files_raise_a_one_sentence_error(tmp_path, name):
    data, said = WRONG[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput) as rejected:
        read_interactions(path, "--train")
    assert str(rejected.value).startswith(said.format(path))
    assert str(rejected.value).endswith(".")


RATED = (
    "user,item,rating,date\nann,fig,3,2024-02-01\nann,pear,5,2023-01-01T10:00:00Z\nbob,fig,4.5,1704067200\n"
)


def test_ratings_and_times_are_used_on_request(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(RATED + "ann,kiwi,5,1900-01-01\nann,pear,1,2025-01-01\n")
    have = read_interactions(path, "--train")
    assert names(have) == {"ann": ["fig", "pear", "kiwi"], "bob": ["fig"]}
    assert (have.low, have.repeated, have.unused) == (0, 1, ("rating", "date"))
    have = read_interactions(path, "--train", min_rating=4.5)
    assert names(have) == {"ann": ["pear", "kiwi"], "bob": ["fig"]}
    assert (have.low, have.repeated, have.unused) == (2, 0, ("date",))
    have = read_interactions(path, "--train", by_time=True)
    assert names(have) == {"ann": ["kiwi", "pear", "fig"], "bob": ["fig"]}
    assert have.unused == ("rating",)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (CSV, {"min_rating": 3}, "`--min-rating` requires exactly one column called `rating` or similar,"),
        (CSV, {"by_time": True}, "`--latest` requires exactly one column called `timestamp` or similar,"),
        (RATED, {"min_rating": 6}, "`--min-rating` is 6, but all 3 ratings in"),
        (RATED.replace("4.5", "?"), {"min_rating": 6}, "line 4: the rating must be a number, but it is `?`."),
        (
            RATED.replace("4.5", "nan"),
            {"min_rating": 6},
            "line 4: the rating must be a number, but it is `nan`",
        ),
        (RATED.replace("2024-02", "02/01"), {"by_time": True}, "line 2: the time must be a number or a date"),
    ],
)
def test_bad_ratings_and_times_raise(tmp_path, text, options, said):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(BadInput) as rejected:
        read_interactions(path, "--train", **options)
    assert said in str(rejected.value)


def test_missing_files_and_columns_are_named(tmp_path):
    path = tmp_path / "a.csv"
    with pytest.raises(BadInput, match=r"\(`--test`\) cannot be read: no such file"):
        read_interactions(path, "--test")
    path.write_text(CSV)
    with pytest.raises(
        BadInput, match=r"line 1: no column is called `movie`. The columns are `when`, `user`, `item`"
    ):
        read_interactions(path, "--train", ("user", "movie"))
    (tmp_path / "b.inter").write_text("who:token\twhat:token\n1\t2\n")
    with pytest.raises(BadInput, match=r"Choose two of `who`, `what` with `--columns USER ITEM`"):
        read_interactions(tmp_path / "b.inter", "--train")
    assert read_interactions(tmp_path / "b.inter", "--train", ("who", "what")).items == ["2"]
    with pytest.raises(BadInput, match="`--columns` must name two different columns, but both are `user`"):
        read_interactions(path, "--train", ("user", "user"))


def test_aligned_pairs_use_the_indices_of_the_known_data(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b.txt").write_text("zoe apple\nçelik kiwi mango pear\nann fig\n")
    known = read_interactions(tmp_path / "a.txt", "--train")
    later, users, items = align(read_interactions(tmp_path / "b.txt", "--test"), known)
    assert names(later) == {"ann": ["fig"], "bob": [], "çelik": ["kiwi", "pear"]}
    assert (users, items) == (1, 1)
    assert later.users is known.users


def test_a_million_pairs_take_less_than_five_seconds(tmp_path):
    path = tmp_path / "million.csv"
    pairs = ((i * 7919 % 30011, i * 104729 % 40009) for i in range(1_000_000))
    path.write_text("user,item\n" + "".join(f"u{user},i{item}\n" for user, item in pairs))
    start = time.process_time()
    have = read_interactions(path, "--train")
    assert time.process_time() - start < 5
    assert len(have) + have.repeated == 1_000_000


@pytest.mark.skipif("TORCHLML_DATA" not in os.environ, reason="TORCHLML_DATA is not set")
def test_gowalla_is_read_completely():
    folder = Path(os.environ["TORCHLML_DATA"]) / "gowalla"
    have = read_interactions(folder / "train.txt.gz", "--train")
    assert (len(have.users), len(have.items), len(have), have.repeated) == (29858, 40981, 810128, 0)
    later, users, items = align(read_interactions(folder / "test.txt.gz", "--test"), have)
    assert (len(later), users, items) == (217242, 0, 0)
