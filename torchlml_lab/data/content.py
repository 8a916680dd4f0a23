"""The text of a file: read, unpacked where it is gzipped, and known to be UTF-8."""

import gzip
import zlib
from pathlib import Path

from torchlml_lab.errors import BadInput, reason


def read_content(path: Path, option: str) -> bytes:
    """Read a text file.

    Args:
        path: The file; gzip is known by its first bytes, whatever the name ends in.
        option: The option that named it, for the sentences.

    Returns:
        Its text as UTF-8, with line ends `\\n` and no byte order mark. What is no such text, or is empty,
        raises `BadInput`.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        said = "it ends in the middle" if isinstance(error, EOFError) else "its gzip data are damaged"
        raise BadInput(f"`{option}` names `{path}`, which cannot be read: {said}.") from error
    except OSError as error:
        raise BadInput(f"`{option}` names `{path}`, which cannot be read: {reason(error)}.") from error
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    data = data if b"\n" in data else data.replace(b"\r", b"\n")
    if not data.strip():
        raise BadInput(f"`{option}` names `{path}`, which is empty.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"`{path}`, line {line}: the text is not UTF-8.") from error
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise BadInput(f"`{path}`, line {line}: a zero byte, so this is no text.")
    return data


def shown(text: str) -> str:
    """A cell or a word of a file for a sentence: not longer than 40 characters, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."
