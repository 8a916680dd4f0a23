"""Invalid arguments raise the right exception, which names the argument, its value and accepted values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import torchlml
from tests.support.fresh import run
from torchlml import compat

X = torch.zeros(3, 5)
V = torch.zeros(6)
OFF = torch.tensor([0, 2, 6])

FUNCTIONS = [torchlml.lml, torchlml.log_lml, torchlml.lml_dual]
Call = Callable[[Callable[..., Any]], Any]
# name -> a call to f, the expected exception, and parts of its message: argument, value, accepted values
WRONG: dict[str, tuple[Call, type[Exception], list[str]]] = {
    "x is a list": (lambda f: f([1.0, 2.0], 1), TypeError, ["`x`", "list", "Tensor"]),
    "x is an array": (lambda f: f(np.zeros(3), 1), TypeError, ["`x`", "ndarray", "Tensor"]),
    "x is None": (lambda f: f(None, 1), TypeError, ["`x`", "NoneType", "Tensor"]),
    "x is int64": (lambda f: f(X.long(), 1), TypeError, ["`x`", "int64", "float32"]),
    "x is bool": (lambda f: f(X.bool(), 1), TypeError, ["`x`", "bool", "float32"]),
    "x is complex": (lambda f: f(X.to(torch.complex64), 1), TypeError, ["`x`", "complex64", "float32"]),
    "x is 0-d": (lambda f: f(torch.tensor(1.0), 1), ValueError, ["`x`", "0-d", "at least one dimension"]),
    "k < 0": (lambda f: f(X, -1), ValueError, ["`k`", "-1", "0", "5"]),
    "k > n": (lambda f: f(X, 6), ValueError, ["`k`", "6", "0", "n = 5"]),
    "k > n along dim": (lambda f: f(X, 4, dim=0), ValueError, ["`k`", "4", "n = 3"]),
    "k slightly above n": (lambda f: f(X, 5.5), ValueError, ["`k`", "5.5", "n = 5"]),
    "k is NaN": (lambda f: f(X, math.nan), ValueError, ["`k`", "nan", "n = 5"]),
    "k is inf": (lambda f: f(X, math.inf), ValueError, ["`k`", "inf", "n = 5"]),
    "k < 0 with mask": (lambda f: f(X, -1, mask=X == 0), ValueError, ["`k`", "-1", "0"]),
    "k is NaN with mask": (lambda f: f(X, math.nan, mask=X == 0), ValueError, ["`k`", "nan"]),
    "k is inf with offsets": (lambda f: f(V, math.inf, offsets=OFF), ValueError, ["`k`", "inf"]),
    "k < 0 with offsets": (lambda f: f(V, -0.5, offsets=OFF), ValueError, ["`k`", "-0.5"]),
    "k is a string": (lambda f: f(X, "2"), TypeError, ["`k`", "'2'", "number"]),
    "k is None": (lambda f: f(X, None), TypeError, ["`k`", "None", "number"]),
    "k is a list": (lambda f: f(X, [1, 2, 3]), TypeError, ["`k`", r"[1, 2, 3]", "tensor"]),
    "k is True": (lambda f: f(X, True), TypeError, ["`k`", "True", "number"]),
    "k is complex": (lambda f: f(X, 1j), TypeError, ["`k`", "1j", "number"]),
    "one k < 0": (lambda f: f(X, torch.tensor([1, -2, 1])), ValueError, ["`k`", "-2", "n = 5"]),
    "one k > n": (lambda f: f(X, torch.tensor([1.0, 7.0, 1.0])), ValueError, ["`k`", "7", "n = 5"]),
    "one k is NaN": (lambda f: f(X, torch.tensor([1.0, math.nan, 1])), ValueError, ["`k`", "nan", "n = 5"]),
    "one k < 0 with offsets": (
        lambda f: f(V, torch.tensor([1.0, -2.0]), offsets=OFF),
        ValueError,
        ["`k`", "-2"],
    ),
    "k is a bool tensor": (lambda f: f(X, torch.tensor(True)), TypeError, ["`k`", "bool", "number"]),
    "k is a complex tensor": (lambda f: f(X, torch.tensor(1j)), TypeError, ["`k`", "complex", "number"]),
    "k per entry": (lambda f: f(X, torch.ones(3, 5)), ValueError, ["`k`", "(3, 5)", "(3,)"]),
    "k of the wrong length": (lambda f: f(X, torch.ones(4)), ValueError, ["`k`", "(4,)", "(3,)"]),
    "k of the wrong length, ragged": (
        lambda f: f(V, torch.ones(3), offsets=OFF),
        ValueError,
        ["`k`", "(3,)", "(2,)"],
    ),
    "k on another device": (lambda f: f(X, torch.ones(3, device="meta")), ValueError, ["`k`", "meta", "cpu"]),
    "0-d k on another device": (
        lambda f: f(X, torch.ones((), device="meta")),
        ValueError,
        ["`k`", "meta", "cpu"],
    ),
    "k is huge": (lambda f: f(X, 10**400), ValueError, ["`k`", "1329 bits", "n = 5"]),
    "k is huge with mask": (lambda f: f(X, 10**400, mask=X == 0), ValueError, ["`k`", "1329 bits", "finite"]),
    "x is sparse": (lambda f: f(X.to_sparse(), 1), TypeError, ["`x`", "sparse_coo", "dense"]),
    "dim too large": (lambda f: f(X, 1, dim=2), ValueError, ["`dim`", "2", "-2", "1"]),
    "dim too small": (lambda f: f(X, 1, dim=-3), ValueError, ["`dim`", "-3", "-2", "1"]),
    "dim is a float": (lambda f: f(X, 1, dim=1.0), TypeError, ["`dim`", "1.0", "int"]),
    "dim is a tuple": (lambda f: f(X, 1, dim=(0, 1)), TypeError, ["`dim`", "(0, 1)", "int"]),
    "mask is float": (lambda f: f(X, 1, mask=X), TypeError, ["`mask`", "float32", "bool"]),
    "mask is uint8": (lambda f: f(X, 1, mask=X.byte()), TypeError, ["`mask`", "uint8", "bool"]),
    "mask is a list": (lambda f: f(X, 1, mask=[True] * 5), TypeError, ["`mask`", "list", "bool tensor"]),
    "mask does not broadcast": (
        lambda f: f(X, 1, mask=torch.ones(4) > 0),
        ValueError,
        ["`mask`", "(4,)", "(3, 5)"],
    ),
    "mask is larger": (
        lambda f: f(X, 1, mask=torch.ones(2, 3, 5) > 0),
        ValueError,
        ["`mask`", "(2, 3, 5)", "(3, 5)"],
    ),
    "mask on another device": (
        lambda f: f(X, 1, mask=torch.ones(3, 5, device="meta", dtype=torch.bool)),
        ValueError,
        ["`mask`", "meta", "cpu"],
    ),
    "offsets are floats": (
        lambda f: f(V, 1, offsets=OFF.float()),
        TypeError,
        ["`offsets`", "float32", "int64"],
    ),
    "offsets are a list": (lambda f: f(V, 1, offsets=[0, 6]), TypeError, ["`offsets`", "list", "int64"]),
    "offsets are bool": (lambda f: f(V, 1, offsets=OFF.bool()), TypeError, ["`offsets`", "bool", "int64"]),
    "offsets are 2-d": (lambda f: f(V, 1, offsets=OFF[None]), ValueError, ["`offsets`", "(1, 3)", "1-d"]),
    "offsets are 0-d": (lambda f: f(V, 1, offsets=OFF[2]), ValueError, ["`offsets`", "()", "1-d"]),
    "offsets are empty": (lambda f: f(V, 1, offsets=OFF[:0]), ValueError, ["`offsets`", "(0,)", "1-d"]),
    "offsets start late": (lambda f: f(V, 1, offsets=OFF[1:]), ValueError, ["`offsets`", "2", "start at 0"]),
    "offsets end early": (lambda f: f(V, 1, offsets=OFF[:2]), ValueError, ["`offsets`", "2", "6"]),
    "offsets end late": (
        lambda f: f(V, 1, offsets=torch.tensor([0, 7])),
        ValueError,
        ["`offsets`", "7", "6"],
    ),
    "offsets decrease": (
        lambda f: f(V, 1, offsets=torch.tensor([0, 4, 2, 6])),
        ValueError,
        ["`offsets`", "nondecreasing"],
    ),
    "offsets on another device": (
        lambda f: f(V, 1, offsets=OFF.to("meta")),
        ValueError,
        ["`offsets`", "meta", "cpu"],
    ),
    "offsets and 2-d x": (lambda f: f(X, 1, offsets=OFF), ValueError, ["`offsets`", "`x`", "2-d", "1-d"]),
    "offsets and dim": (lambda f: f(V, 1, dim=1, offsets=OFF), ValueError, ["`dim`", "1"]),
}


def check(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message
    assert "\n" not in message
    assert re.fullmatch(r"[`A-Z].*\.", message)
    assert not re.search(r"\.\s+[A-Z]", message), "the message must be one sentence"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", WRONG)
def test_functions(function: Callable[..., Any], case: str) -> None:
    call, exception, words = WRONG[case]
    with pytest.raises(exception) as raised:
        call(function)
    assert raised.type is exception
    check(str(raised.value), words)


@pytest.mark.parametrize("case", [case for case in WRONG if "dim" not in case and "offsets" not in case])
def test_the_layer_raises_the_same_errors(case: str) -> None:
    call, exception, words = WRONG[case]
    with pytest.raises(exception) as raised:
        call(lambda x, k, **others: torchlml.LML(k)(x, **others))
    # Arguments that are invalid for every input raise an error in the constructor, before n is known.
    check(str(raised.value), [word for word in words if word not in ("5", "n = 5")])


LAYERS: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "temperature 0": (lambda: torchlml.LML(2, temperature=0), ValueError, ["`temperature`", "0", "positive"]),
    "temperature -1": (
        lambda: torchlml.LML(2, temperature=-1.0),
        ValueError,
        ["`temperature`", "-1", "positive"],
    ),
    "temperature NaN": (
        lambda: torchlml.LML(2, temperature=math.nan),
        ValueError,
        ["`temperature`", "nan", "positive"],
    ),
    "temperature is text": (
        lambda: torchlml.LML(2, temperature="hot"),
        TypeError,
        ["`temperature`", "'hot'"],
    ),  # type: ignore[arg-type]
    "k is text": (lambda: torchlml.LML("a"), TypeError, ["`k`", "'a'", "number"]),
    "k < 0": (lambda: torchlml.LML(-5), ValueError, ["`k`", "-5", "0"]),
    "N is text": (lambda: compat.LML(N="5"), ValueError, ["`N`", "'5'", "nonnegative integer"]),
    "N is True": (
        lambda: compat.LML(N=torch.tensor(True)),
        ValueError,
        ["`N`", "True", "nonnegative integer"],
    ),
    "samples": (lambda: torchlml.lml_bracketing(X, 1, samples=1), ValueError, ["`samples`", "1", "at least"]),
    "tolerance": (lambda: torchlml.lml_bracketing(X, 1, tolerance=-1.0), ValueError, ["`tolerance`", "-1"]),
    "tolerance NaN": (
        lambda: torchlml.lml_bracketing(X, 1, tolerance=math.nan),
        ValueError,
        ["`tolerance`", "nan"],
    ),
    "max_iterations": (
        lambda: torchlml.lml_bracketing(X, 1, max_iterations=0),
        ValueError,
        ["`max_iterations`", "0", "at least 1"],
    ),
    "N < 0": (lambda: compat.LML(N=-1), ValueError, ["`N`", "-1"]),
    "compat, 3-d": (lambda: compat.LML(N=1)(torch.zeros(2, 3, 4)), ValueError, ["`x`", "3"]),
    "compat, 0-d": (lambda: compat.LML(N=1)(torch.tensor(1.0)), ValueError, ["`x`", "0"]),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_and_settings(case: str) -> None:
    call, exception, words = LAYERS[case]
    with pytest.raises(exception) as raised:
        call()
    assert raised.type is exception
    check(str(raised.value), words)


RIGHT: dict[str, Callable[[], Any]] = {
    "k = n": lambda: torchlml.lml(X, 5),
    "k = 0": lambda: torchlml.lml(X, 0),
    "k > unmasked entries": lambda: torchlml.lml(X, 4, mask=torch.tensor([True, False, False, False, False])),
    "k > the length of a ragged row": lambda: torchlml.lml(V, 4, offsets=OFF),
    "numpy k": lambda: torchlml.lml(X, np.float64(2.5)),
    "numpy integer k": lambda: torchlml.lml(X, np.int64(2)),
    "int tensor k": lambda: torchlml.lml(X, torch.tensor([1, 2, 3])),
    "k with keepdim": lambda: torchlml.lml(X, torch.ones(3, 1)),
    "k with keepdim, dim 0": lambda: torchlml.lml(X, torch.ones(1, 5), dim=0),
    "k with keepdim, ragged": lambda: torchlml.lml(V, torch.ones(2, 1), offsets=OFF),
    "k is a Fraction": lambda: torchlml.lml(X, Fraction(5, 2)),
    "bfloat16 k": lambda: torchlml.lml(X, torch.tensor(2.5, dtype=torch.bfloat16)),
    "k that broadcasts": lambda: torchlml.lml(X, torch.tensor([2.0])),
    "int32 offsets": lambda: torchlml.lml(V, 1, offsets=OFF.int()),
    "offsets and dim 0": lambda: torchlml.lml(V, 1, dim=0, offsets=OFF),
    "positional dim": lambda: torchlml.lml(X, 1, 0),
}


@pytest.mark.parametrize("case", RIGHT)
def test_accepted_arguments(case: str) -> None:
    assert bool(RIGHT[case]().isfinite().all())


def test_public_names() -> None:
    assert {"lml", "log_lml", "lml_dual", "LML"} <= set(torchlml.__all__)
    for name in torchlml.__all__:
        assert getattr(torchlml, name).__doc__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", torchlml.__version__)


def test_import_is_silent() -> None:
    done = run("import warnings; warnings.simplefilter('error'); import torchlml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_calls_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    for function in FUNCTIONS:
        function(torch.randn(2, 9, requires_grad=True), 3).sum().backward()
    assert capfd.readouterr() == ("", "")
