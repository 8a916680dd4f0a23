"""The `torchlml` command line: training, evaluation, benchmarks, studies and figures."""

from typing import Any

__all__ = ["TopKClassifier"]


def __getattr__(name: str) -> Any:
    # Imported on first access, because scikit-learn and scipy take a second to import.
    if name in __all__:
        from torchlml_lab import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
