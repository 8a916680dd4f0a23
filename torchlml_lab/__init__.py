"""Everything that trains, measures and draws with torchlml, behind the command `torchlml`."""

from typing import Any

__all__ = ["TopKClassifier"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: scikit-learn and scipy take a second to import.
    if name in __all__:
        from torchlml_lab import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
