"""The `torchlml` command line: training, evaluation, benchmarks, studies and figures."""

import importlib
from typing import Any

__all__ = ["TopKClassifier", "load_run"]

_MODULES = {"TopKClassifier": "classifier", "load_run": "multilabel.program"}


def __getattr__(name: str) -> Any:
    # Imported on first access, because scikit-learn and scipy take a second to import.
    if name in _MODULES:
        return getattr(importlib.import_module(f"torchlml_lab.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
