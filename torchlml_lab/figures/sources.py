"""Which CSV a figure is drawn from: the one that is named, one's own, or the one of the study."""

from collections.abc import Sequence
from pathlib import Path

from torchlml_lab.errors import BadInput


class NotMadeYet(BadInput):
    """The CSV of a figure is not there; the sentence names the command that makes it."""


def find(named: Path | None, usual: Sequence[Path], command: str) -> Path:
    """Find the CSV.

    Args:
        named: What `--csv` said, if anything.
        usual: Where to look otherwise, in this order.
        command: The command that makes it.

    Returns:
        The path of a file that is there; `NotMadeYet` is raised when there is none.
    """
    places = usual if named is None else [named]
    for path in places:
        if path.exists():
            return path
    raise NotMadeYet(f"There is no `{places[0]}` to draw: `{command}` makes it.")
