"""The console that all commands print to: text appears exactly as it is."""

from typing import Any

from rich.console import Console


def new_console(**options: Any) -> Console:
    """Create a console that prints text verbatim.

    Labels, texts, item names and paths come from users, and Rich would interpret `[int]` as markup and
    `:cat:` as an emoji. Styled text is passed as `rich.text.Text` instead.

    Args:
        options: Further arguments of `rich.console.Console`, such as `quiet`.

    Returns:
        A console that interprets neither markup nor emoji codes and highlights nothing.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)
