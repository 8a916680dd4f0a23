"""Invalid arguments to losses and metrics raise clear errors, and unusual but valid arguments work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torchlml
from tests.library.test_arguments import check
from tests.support.losses import MULTI_LABEL, every, multi_label
from torchlml.metrics import SceneGraphRecall, TopKRecall, topk_recall

X, Y = torch.zeros(3, 6), torch.tensor([0, 1, 2])
META = torch.device("meta")

# name -> logits, target, settings, the exception, and words in its message
WRONG = {
    "logits are a list": ([[0.0]], Y, {}, TypeError, ["`logits`", "list", "Tensor"]),
    "logits are None": (None, Y, {}, TypeError, ["`logits`", "NoneType", "Tensor"]),
    "logits are sparse": (X.to_sparse(), Y, {}, TypeError, ["`logits`", "sparse_coo", "dense"]),
    "target is a list": (X, [0, 1, 2], {}, TypeError, ["`target`", "list", "padded", "multi-hot"]),
    "target is a list of lists": (
        X,
        [[0], [1, 2], []],
        {},
        TypeError,
        ["`target`", "list", "padded", "multi-hot"],
    ),
    "target is None": (X, None, {}, TypeError, ["`target`", "NoneType", "Tensor"]),
    "target is an array": (X, np.zeros(3, int), {}, TypeError, ["`target`", "ndarray", "Tensor"]),
    "mask is a list": (X, Y, {"mask": [True] * 6}, TypeError, ["`mask`", "list", "bool tensor"]),
    "weight is a list": (X, Y, {"weight": [1.0] * 6}, TypeError, ["`weight`", "list", "Tensor"]),
    "weight is negative": (X, Y, {"weight": torch.arange(6.0) - 1}, ValueError, ["`weight`", "negative"]),
    "weight is NaN": (X, Y, {"weight": X[0] + math.nan}, ValueError, ["`weight`", "NaN"]),
    "ignore_index is text": (X, Y, {"ignore_index": "x"}, TypeError, ["`ignore_index`", "'x'", "int"]),
    "target on another device": (X, Y.to(META), {}, ValueError, ["`target`", "meta", "cpu"]),
    "mask on another device": (X, Y, {"mask": (X == 0).to(META)}, ValueError, ["`mask`", "meta", "cpu"]),
    "weight on another device": (X, Y, {"weight": X[0].to(META)}, ValueError, ["`weight`", "meta", "cpu"]),
}


@every
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(loss, case):
    logits, target, settings, error, words = WRONG[case]
    with pytest.raises(error) as caught:
        loss(logits, target, 2, **settings)
    assert caught.type is error
    check(str(caught.value), words)


@multi_label
def test_wrong_multi_hots_and_ragged_batches(loss):
    for call, error, words in (
        (lambda: loss(X, X + math.nan, 2), ValueError, ["`target`", "NaN"]),
        (lambda: loss(X, (X == 0).to_sparse(), 2), TypeError, ["`target`", "dense"]),
        (lambda: loss(X[0], Y, 2, offsets=torch.tensor([0, 6]).to(META)), ValueError, ["`offsets`", "meta"]),
        (lambda: loss(X[0], Y, 2, offsets=[0, 6]), TypeError, ["`offsets`", "list"]),
        (lambda: loss(X, Y, 10**400), ValueError, ["`k`", "1329 bits"]),
    ):
        with pytest.raises(error) as caught:
            call()
        check(str(caught.value), words)


def test_settings_of_the_wrong_type():
    for call, word in (
        (lambda: torchlml.smooth_topk_svm_loss(X, Y, 2, tau="1"), "`tau`"),
        (lambda: torchlml.topk_svm_loss(X, Y, 2, alpha="1"), "`alpha`"),
        (lambda: torchlml.SmoothTopKSVMLoss(2, tau="1"), "`tau`"),
        (lambda: torchlml.TopKSVMLoss(2, alpha=None), "`alpha`"),
        (lambda: torchlml.LMLLoss("a"), "`k`"),
        (lambda: torchlml.LMLLoss(2, weight=[1.0]), "`weight`"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        check(str(caught.value), [word])
    with pytest.raises(ValueError, match="`k` must be"):
        torchlml.LMLLoss(-5)
    with pytest.raises(ValueError, match="`label_reduction` must be"):
        torchlml.lml_loss(X, Y, 2, label_reduction="none")


def test_a_scalar_k_on_another_device_is_rejected():
    with pytest.raises(ValueError, match="`k` must be on the device of `logits`, cpu, but it is on meta"):
        torchlml.lml_loss(X, Y, torch.tensor(2.0, device=META))


@every
def test_losses_on_the_meta_device_have_the_right_shapes(loss):
    x = torch.zeros(3, 6, device=META, requires_grad=True)
    weight, mask = torch.ones(6, device=META), torch.ones(6, device=META, dtype=torch.bool)
    value = loss(x, Y.to(META), 2, weight=weight, mask=mask, reduction="none")
    assert (value.shape, value.device) == ((3,), META)
    (grad,) = torch.autograd.grad(loss(x, Y.to(META), 2), x)
    assert (grad.shape, grad.device) == (x.shape, META)


@multi_label
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_an_integer_multi_hot_is_rejected_by_its_shape(loss, compiled, dtype):
    torch.compiler.reset()
    call = torch.compile(loss, backend="eager") if compiled else loss
    for n in (2, 6):
        hot = torch.eye(n, dtype=dtype)
        with pytest.raises(Exception, match=r"pass `target.bool\(\)`"):
            call(torch.zeros(n, n), hot, 1)
        with pytest.raises(Exception, match=r"pass `target.bool\(\)`"):
            call(torch.zeros(n), hot[0], 1, offsets=torch.tensor([0, n]))
    with pytest.raises(ValueError, match=r"target\.bool"):
        TopKRecall(1).update(torch.zeros(3, 3), torch.eye(3, dtype=dtype))


@multi_label
def test_a_list_as_wide_as_a_row_needs_one_more_column(loss):
    x, lists = torch.randn(2, 3), torch.tensor([[0, 2, -100], [1, -100, -100]])
    with pytest.raises(ValueError, match="one more column of `ignore_index`"):
        loss(x, lists, 1)
    hot = torch.tensor([[True, False, True], [False, True, False]])
    torch.testing.assert_close(loss(x, F.pad(lists, (0, 1), value=-100), 1), loss(x, hot, 1))


@every
def test_bytes_are_class_indices(loss):
    x, y = torch.randn(4, 9), torch.tensor([0, 3, 8, 255])
    expected = loss(x, torch.tensor([0, 3, 8, -100]), 2)
    assert torch.equal(loss(x, y.byte(), 2, ignore_index=255), expected)


def test_k_may_have_a_trailing_dimension_as_with_keepdim():
    x, k = torch.randn(3, 6), torch.tensor([1.0, 2.5, 4.0])
    assert torch.equal(torchlml.lml_loss(x, Y, k[:, None]), torchlml.lml_loss(x, Y, k))


def test_wrong_arguments_of_metrics():
    box: Any = {"boxes": [[0, 0, 1, 1]], "labels": Y, "pairs": Y, "scores": X}
    bare: Any = [[1]]
    for call, words in (
        (lambda: topk_recall([[1.0]], Y, 1), ["`preds`", "list"]),
        (lambda: topk_recall(X, [0, 1, 2], 1), ["`target`", "list", "padded"]),
        (lambda: topk_recall(X, Y, 1, mask=[True]), ["`mask`", "list"]),
        (lambda: SceneGraphRecall().update([box], [box]), ["`preds[0]['boxes']`", "list", "Tensor"]),
        (lambda: SceneGraphRecall().update(bare, [box]), ["`preds[0]`", "list", "mapping"]),
        (lambda: SceneGraphRecall().update(box, box), ["`preds`", "dict", "list"]),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        check(str(caught.value), words)


@multi_label
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_mean_over_the_labels_of_a_row(loss, reduction):
    lists = torch.tensor([[0, 3, 5, 3], [1, -100, -100, -100], [-100] * 4, [8, 2, -100, -100]])
    number = torch.tensor([3.0, 1, 1, 2], dtype=torch.float64)
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    hot = torch.zeros(4, 10, dtype=torch.bool).scatter(1, lists.where(lists >= 0, 9), True)[:, :9]
    offsets, weight = torch.arange(5) * 9, torch.rand(9, dtype=torch.float64)
    places = torch.where(lists >= 0, lists + offsets[:4, None], -100).flatten()
    forms: Any = (
        (x, lists, {}),
        (x, hot, {}),
        (x, hot.double() * 0.3, {"weight": weight}),
        (x, lists, {"weight": weight}),
        (x.flatten(), places, {"offsets": offsets}),
        (x.flatten(), hot.flatten(), {"offsets": offsets}),
    )
    for logits, target, settings in forms:
        rows = loss(logits, target, 3, reduction="none", **settings) / number
        expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / 3}[reduction]
        settings = {**settings, "reduction": reduction, "label_reduction": "mean"}
        value = loss(logits, target, 3, **settings)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(value.sum(), x)
        (expected_grad,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12)

        def function(z, logits=logits, target=target, settings=settings):
            return loss(z.reshape(logits.shape), target, 3, **settings)

        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)
        tangent = torch.func.jvp(lambda z, f=function: f(z).sum(), (x.detach(),), (expected_grad,))[1]
        torch.testing.assert_close(tangent, (expected_grad**2).sum())


def test_modules_take_the_mean_over_labels():
    x, lists = torch.randn(2, 5), torch.tensor([[0, 3], [1, -100]])
    for loss, module in MULTI_LABEL.items():
        made = module(2, label_reduction="mean")
        assert torch.equal(made(x, lists), loss(x, lists, 2, label_reduction="mean"))
        assert "label_reduction='mean'" in repr(made)


@torch._dynamo.config.patch(compiled_autograd=True)
def test_compiled_autograd():
    """The backward pass is also compiled, and it receives all tensors that the forward pass saved."""
    torch.compiler.reset()
    x = torch.randn(3, 6, requires_grad=True)

    @torch.compile(backend="aot_eager")
    def step(target):
        torchlml.lml_loss(x, target, 2).backward()

    for target in (Y, torch.tensor([0, -100, 2])):
        (expected,) = torch.autograd.grad(torchlml.lml_loss(x, target, 2), x)
        x.grad = None
        step(target)
        torch.testing.assert_close(x.grad, expected)


def hugging_face_loss(outputs, labels, num_items_in_batch=None):
    """Return the mean loss over all rows of a training step, for `Trainer(compute_loss_func=...)`.

    With gradient accumulation, the Trainer adds up the results for the batches of a step. Its
    `num_items_in_batch` is the number of label entries in the whole step that are not -100. This is the
    number of rows if there is one label per row, or n times the number of rows if the target is multi-hot.
    """
    total = torchlml.lml_loss(outputs["logits"], labels, k=2, reduction="sum")
    if num_items_in_batch is None:  # evaluation, one batch at a time
        num_items_in_batch = (labels != -100).sum()
    rows = num_items_in_batch if labels.dim() == 1 else num_items_in_batch / labels.shape[-1]
    return total / rows


@pytest.mark.parametrize("hot", [False, True])
def test_gradient_accumulation_gives_the_mean_over_the_whole_step(hot):
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(6, (12,))
    y = F.one_hot(y, 6).double() if hot else y.index_fill(0, torch.tensor([1, 9]), -100)
    items = (y != -100).sum()
    parts = [hugging_face_loss({"logits": a}, b, items) for a, b in zip(x.split(5), y.split(5), strict=True)]
    torch.testing.assert_close(sum(parts), torchlml.lml_loss(x, y, 2))
    torch.testing.assert_close(hugging_face_loss({"logits": x}, y), torchlml.lml_loss(x, y, 2))


@pytest.mark.parametrize("k", [0, 0.0, torch.tensor(0), torch.tensor([2.0, 0.0])], ids=str)
@pytest.mark.parametrize("bound", ["exactly", "at_most"])
def test_k_of_0_in_a_row_with_a_label(k: Any, bound: Any) -> None:
    logits, hidden, weight = torch.randn(2, 5), torch.randn(2, 3), torch.randn(5, 3)
    target = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="`k` must be positive in every row that has a label"):
        torchlml.lml_loss(logits, target, k, bound=bound)
    with pytest.raises(ValueError, match="`k` must be positive in every row that has a label"):
        torchlml.linear_lml_loss(hidden, weight, target, k, bound=bound)


def test_k_of_0_is_accepted_without_labels() -> None:
    logits, hidden, weight = torch.randn(2, 5), torch.randn(2, 3), torch.randn(5, 3)
    target, k = torch.tensor([1, -100]), torch.tensor([2.0, 0.0])
    assert torchlml.lml_loss(logits, target, k).isfinite()
    assert torchlml.linear_lml_loss(hidden, weight, target, k).isfinite()
    assert torchlml.lml_loss(logits, torch.tensor([1, 2]), 0, bound="at_least").isfinite()
