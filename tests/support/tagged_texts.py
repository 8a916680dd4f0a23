"""Synthetic texts whose tags are easy to learn: each tag has its own words, mixed with common words."""

from __future__ import annotations

import csv
import random
from pathlib import Path

WORDS = {
    "python": "import module pip function dict",
    "pandas": "dataframe column groupby merge csv",
    "javascript": "browser node callback promise dom",
    "sql": "select join table query where",
    "c++": "template pointer header linker const",
    "docker": "container image volume compose port",
}
NOTHING = "how to do this when the error is not working my code with a new version please help"


def tagged_texts(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Return texts of about 15 words with their tags, mostly one or two per text."""
    chosen = random.Random(seed)
    rows = []
    for _ in range(count):
        tags = chosen.sample(list(WORDS), chosen.choices((1, 2, 3), (5, 3, 1))[0])
        words = [chosen.choice(WORDS[tag].split()) for tag in tags for _ in range(3)]
        words += chosen.choices(NOTHING.split(), k=10)
        chosen.shuffle(words)
        rows.append((" ".join(words), tags))
    return rows


def write_texts(path: Path, rows: list[tuple[str, list[str]]]) -> Path:
    """Write the texts as a CSV file with the columns `text` and `tags`, with `;` between the tags."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "tags"))
        writer.writerows((text, ";".join(tags)) for text, tags in rows)
    return path
