"""All target formats, and invariances of the losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import torchlml
from tests.support.losses import every, multi_label, single_label


def value_and_grad(loss, logits, *arguments, **settings):
    x = logits.detach().clone().requires_grad_()
    value = loss(x, *arguments, **settings)
    (grad,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), grad


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@multi_label
def test_an_index_a_list_of_one_and_a_multi_hot_are_equivalent(loss):
    x, y = torch.randn(6, 20, dtype=torch.float64), torch.randint(20, (6,))
    expected = value_and_grad(loss, x, y, 4)
    same(value_and_grad(loss, x, y[:, None], 4), expected)
    same(value_and_grad(loss, x, F.one_hot(y, 20).bool(), 4), expected)
    same(value_and_grad(loss, x, F.one_hot(y, 20).double(), 4), expected)


@multi_label
def test_padding_order_and_repetition_do_not_matter(loss):
    x = torch.randn(3, 20, dtype=torch.float64) * 3
    none = -100
    short = torch.tensor([[4, 7, 1], [19, none, none], [none, none, none]])
    expected = value_and_grad(loss, x, short, 5)
    others = [
        [[1, 4, 7], [none, 19, none], [none, none, none]],
        [[none, 7, none, 4, none, 1, none], [none, none, none, none, none, none, 19], [none] * 7],
        [[7, 7, 4, 1, 4, 4], [19, 19, 19, 19, none, 19], [none] * 6],
    ]
    for other in others:
        same(value_and_grad(loss, x, torch.tensor(other), 5), expected)
    same(
        value_and_grad(
            loss, x, torch.tensor(others[1]).where(torch.tensor(others[1]) >= 0, -1), 5, ignore_index=-1
        ),
        expected,
    )
    multi_hot = torch.zeros(3, 20, dtype=torch.bool)
    multi_hot[0, [1, 4, 7]] = multi_hot[1, 19] = True
    same(value_and_grad(loss, x, multi_hot, 5), expected)


@every
def test_ignored_rows_have_no_effect_even_if_they_contain_nan(loss):
    x, y = torch.randn(6, 12, dtype=torch.float64), torch.tensor([3, -100, 11, -100, 0, -100])
    x[1, 2], x[3, 5], x[3, 6], x[5] = math.nan, math.inf, -math.inf, math.nan
    kept, ignored = [0, 2, 4], [1, 3, 5]
    value, grad = value_and_grad(loss, x, y, 4)
    expected, expected_grad = value_and_grad(loss, x[kept], y[kept], 4)
    same(value, expected)
    same(grad[kept], expected_grad)
    assert (grad[ignored] == 0).all()
    same(loss(x, y, 4, reduction="none")[ignored], torch.zeros(3, dtype=torch.float64))


@multi_label
def test_rows_without_labels_are_ignored_in_every_form(loss):
    x = torch.randn(4, 9, dtype=torch.float64)
    x[2, 0] = math.nan
    observed = torch.zeros(4, 9, dtype=torch.bool)
    observed[0, 1] = observed[3, 5] = observed[3, 6] = True
    kept = [0, 3]
    expected, expected_grad = value_and_grad(loss, x[kept], observed[kept], 3)
    offsets = torch.arange(5) * 9
    for logits, target, settings in (
        (x, observed, {}),
        (x, observed.double(), {}),
        (x.flatten(), observed.flatten(), {"offsets": offsets}),
        (x.flatten(), observed.flatten().nonzero().flatten(), {"offsets": offsets}),
    ):
        value, grad = value_and_grad(loss, logits, target, 3, **settings)
        same(value, expected)
        same(grad.reshape(4, 9)[kept], expected_grad)
        assert (grad.reshape(4, 9)[[1, 2]] == 0).all()


@every
def test_the_mean_of_no_rows_is_zero(loss):
    x = torch.randn(3, 8, dtype=torch.float64)
    value, grad = value_and_grad(loss, x, torch.full((3,), -100), 2)
    assert value == 0
    assert (grad == 0).all()
    assert loss(x[:0], torch.zeros(0, dtype=torch.int64), 2) == 0
    assert loss(x[:0], torch.zeros(0, dtype=torch.int64), 2, reduction="none").shape == (0,)


@every
def test_reductions_and_leading_dimensions(loss):
    x, y = torch.randn(2, 3, 4, 10, dtype=torch.float64), torch.randint(10, (2, 3, 4))
    y[0, 0, 0] = -100
    rows = loss(x, y, 3, reduction="none")
    assert rows.shape == (2, 3, 4)
    same(loss(x, y, 3, reduction="sum"), rows.sum())
    same(loss(x, y, 3), rows.sum() / 23)
    same(loss(x[1, 2, 3], y[1, 2, 3], 3), rows[1, 2, 3])
    transposed = x.transpose(0, 2)
    same(loss(transposed, y.transpose(0, 2), 3, reduction="none"), rows.transpose(0, 2))


@every
def test_a_class_weight_multiplies_the_losses_of_its_labels(loss):
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 5, -100])
    weight = torch.tensor([0.0, 0.5, 1, 2, 3, 4])
    rows = loss(x, y, 2, reduction="none")
    weighted = loss(x, y, 2, weight=weight, reduction="none")
    same(weighted[:6], rows[:6] * weight)
    same(loss(x, y, 2, weight=weight), weighted.sum() / 6)


@multi_label
def test_label_weights_and_class_weights_multiply(loss):
    x = torch.randn(5, 8, dtype=torch.float64)
    observed = torch.rand(5, 8) < 0.4
    weights = torch.rand(5, 8, dtype=torch.float64) * observed
    by_class = torch.rand(8, dtype=torch.float64)
    # The loss of a row is a sum over its labels, so it is linear in the weights.
    single = torch.zeros(5, 8, dtype=torch.float64)
    for i, j in observed.nonzero().tolist():
        only = (observed[i].double() * 1e-300).index_fill(0, torch.tensor(j), 1)
        single[i, j] = loss(x[i], only, 3)
    same(loss(x, weights, 3, weight=by_class, reduction="none"), (single * weights * by_class).sum(-1))
    same(loss(x, observed, 3, weight=by_class, reduction="none"), (single * by_class).sum(-1))


def test_a_label_of_weight_zero_does_not_compete_with_the_others():
    x = torch.tensor([5.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    weight = torch.tensor([0.0, 1, 1, 1])
    value = torchlml.truncated_entropy_loss(x, torch.tensor([0, 1]), 1, weight=weight)
    assert value.item() == pytest.approx(math.log1p(2 * math.exp(-1)))


@multi_label
def test_ragged_rows_give_the_same_loss_as_dense_rows(loss):
    lengths = [5, 0, 12, 1, 30]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(48, dtype=torch.float64) * 3
    observed = torch.rand(48) < 0.3
    observed[5] = True
    expected, gradient = [], []
    for i in range(5):
        part = slice(int(offsets[i]), int(offsets[i + 1]))
        if not lengths[i]:
            expected.append(torch.zeros((), dtype=torch.float64))
            continue
        mask = torch.ones(lengths[i], dtype=torch.bool)  # with a mask, k may exceed the length of the row
        row, row_gradient = value_and_grad(
            loss, *_padded(values[part], observed[part]), 4, mask=F.pad(mask, (0, 40 - lengths[i]))
        )
        expected.append(row)
        gradient.append(row_gradient[: lengths[i]])
    for target in (observed, observed.double(), observed.nonzero().flatten().repeat(2)):
        rows, grad = value_and_grad(loss, values, target, 4, offsets=offsets, reduction="none")
        same(rows, torch.stack(expected))
        same(grad, torch.cat(gradient))
    with_padding = F.pad(observed.nonzero().flatten(), (3, 2), value=-7)
    same(
        loss(values, with_padding, 4, offsets=offsets.int(), ignore_index=-7, reduction="none"),
        torch.stack(expected),
    )


def _padded(values, observed):
    return F.pad(values, (0, 40 - len(values)), value=9.0), F.pad(observed, (0, 40 - len(values)))


@every
def test_masked_entries_have_no_effect(loss):
    x, y = torch.randn(6, 10, dtype=torch.float64), torch.randint(5, (6,))
    wide = torch.cat([x, torch.full((6, 3), 50.0, dtype=torch.float64)], 1)
    wide[0, 10] = math.nan
    mask = torch.arange(13) < 10
    expected, expected_grad = value_and_grad(loss, x, y, 4)
    value, grad = value_and_grad(loss, wide, y, 4, mask=mask)
    same(value, expected)
    same(grad[:, :10], expected_grad)
    assert (grad[:, 10:] == 0).all()


@every
def test_a_row_with_fewer_than_k_entries_has_zero_loss(loss):
    x = torch.randn(2, 6, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    value, grad = value_and_grad(loss, x, torch.tensor([1, 2]), 4, mask=mask, reduction="none")
    assert value[0] == 0
    assert value[1] > 0
    assert (grad[0] == 0).all()


@every
def test_a_nan_affects_only_its_own_row(loss):
    x, y = torch.randn(3, 9, dtype=torch.float64), torch.tensor([1, 2, 3])
    clean = loss(x, y, 3, reduction="none")
    x[1, 7] = math.nan
    value = loss(x, y, 3, reduction="none")
    assert value[1].isnan()
    assert (value[[0, 2]] == clean[[0, 2]]).all()


@multi_label
def test_an_impossible_label_has_infinite_loss(loss):
    x = torch.zeros(2, 5)
    x[0, 1] = -math.inf
    value = loss(x, torch.tensor([1, 1]), 2, reduction="none")
    assert value[0] == math.inf
    assert value[1].isfinite()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(loss, dtype):
    x, y = (torch.randn(64, 50) * 4).to(dtype), torch.randint(50, (64,))
    value, grad = value_and_grad(loss, x, y, 5)
    expected, expected_grad = value_and_grad(loss, x.float(), y, 5)
    assert value.dtype == grad.dtype == dtype
    assert value == expected.to(dtype)
    rows = loss(x, y, 5, reduction="none")
    assert torch.equal(rows, loss(x.float(), y, 5, reduction="none").to(dtype))
    torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@every
def test_under_autocast_the_loss_is_float32(loss):
    x, y = (torch.randn(8, 50) * 4).bfloat16(), torch.randint(50, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        value, grad = value_and_grad(loss, x, y, 5)
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert value == loss(x.float(), y, 5)


def test_k_may_be_fractional_and_differ_from_row_to_row():
    x, y = torch.randn(2, 3, 8, dtype=torch.float64), torch.randint(8, (2, 3))
    k = torch.tensor([[1.0, 2.5, 3], [4, 5, 6]], dtype=torch.float64)
    rows = torchlml.lml_loss(x, y, k, reduction="none")
    for i in range(2):
        for j in range(3):
            same(rows[i, j], torchlml.lml_loss(x[i, j], y[i, j], k[i, j].item()))


ROWS = torch.zeros(3, 6)
LABELS = torch.tensor([0, 1, 2])
FIRST_MASKED = torch.arange(6) > 0


@pytest.mark.parametrize(
    ("error", "words", "arguments", "settings"),
    [
        (ValueError, "`target` must contain class indices from 0 to 5", (ROWS, LABELS + 4, 2), {}),
        (ValueError, "it contains -1", (ROWS, LABELS - 1, 2), {}),
        (ValueError, "`target` must", (ROWS, LABELS[:2], 2), {}),
        (TypeError, "`logits` must be float32, float64", (ROWS.long(), LABELS, 2), {}),
        (ValueError, "`logits` must have at least one dimension", (ROWS[0, 0], LABELS, 2), {}),
        (ValueError, "`k` must be", (ROWS, LABELS, 7), {}),
        (ValueError, "`k` must be", (ROWS, LABELS, -1), {}),
        (TypeError, "`k` must be", (ROWS, LABELS, "five"), {}),
        (ValueError, '`reduction` must be "mean", "sum" or "none"', (ROWS, LABELS, 2), {"reduction": "avg"}),
        (ValueError, "must be a floating-point tensor of shape (6,)", (ROWS, LABELS, 2), {"weight": ROWS}),
        (TypeError, "`mask` must be a bool tensor", (ROWS, LABELS, 2), {"mask": ROWS}),
        (ValueError, "`mask` must broadcast", (ROWS, LABELS, 2), {"mask": ROWS[:2] == 0}),
        (ValueError, "a label where `mask` is False", (ROWS, LABELS, 2), {"mask": FIRST_MASKED}),
    ],
)
@every
def test_wrong_targets_raise(loss, error, words, arguments, settings):
    with pytest.raises(error) as caught:
        loss(*arguments, **settings)
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("words", "target", "settings"),
    [
        ("`target` must be int64 or uint8 (class indices", LABELS.int(), {}),
        ("must have the shape of the logits, (3, 6)", ROWS[:, 1:], {}),
        ("`target` must contain nonnegative weights", ROWS - 1, {}),
        ("pass `target.bool()`", F.one_hot(LABELS, 6), {}),
        ("`target` has a label where `mask` is False", ROWS == 0, {"mask": torch.arange(6) > 0}),
        ("With `offsets`, `logits` must be a 1-d tensor", LABELS, {"offsets": torch.tensor([0, 18])}),
    ],
)
@multi_label
def test_wrong_multi_label_targets_raise(loss, words, target, settings):
    with pytest.raises((TypeError, ValueError)) as caught:
        loss(ROWS, target, 2, **settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("words", "target", "settings"),
    [
        ("`target` must contain positions from 0 to 17", torch.tensor([18]), {}),
        ("With `offsets`, `target` must be a 1-d tensor", LABELS[:, None], {}),
        ("`weight` must be None for ragged rows", LABELS, {"weight": torch.ones(18)}),
        ("`target` has a label where `mask` is False", LABELS, {"mask": torch.arange(18) > 0}),
        ("`offsets` must start at 0", LABELS, {"offsets": torch.tensor([0, 5])}),
        ("`offsets` must be in nondecreasing order", LABELS, {"offsets": torch.tensor([0, 9, 5, 18])}),
        ("`offsets` must be an int64 or int32 tensor", LABELS, {"offsets": torch.tensor([0.0, 18])}),
        ("pass `target.bool()`", torch.zeros(18, dtype=torch.int64), {}),
    ],
)
@multi_label
def test_wrong_ragged_batches_raise(loss, words, target, settings):
    with pytest.raises((TypeError, ValueError)) as caught:
        loss(ROWS.flatten(), target, 2, **{"offsets": torch.tensor([0, 6, 18]), **settings})
    assert words in str(caught.value)


@single_label
def test_the_svms_take_one_label_and_dense_rows_only(loss):
    name = loss.__name__
    for target in (LABELS[:, None], ROWS == 0, ROWS):
        with pytest.raises(ValueError, match=f"because {name} is defined for a single label"):
            loss(ROWS, target, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'offsets'"):
        loss(ROWS.flatten(), LABELS, 2, offsets=torch.tensor([0, 6, 12, 18]))
    ragged = torch.nested.nested_tensor([ROWS[0], ROWS[1, :4]], layout=torch.jagged)
    with pytest.raises(ValueError, match=f"`logits` must have rows of equal length for {name}"):
        loss(ragged, LABELS[:2], 2)
    with pytest.raises(ValueError, match="`k` must be from 1 to 5"):
        loss(ROWS, LABELS, 6)


def test_settings_of_the_svms_are_checked():
    for settings, words in (
        ({"tau": 0.0}, "`tau` must be a positive number"),
        ({"tau": math.nan}, "`tau` must be a positive number"),
        ({"alpha": -1.0}, "`alpha` must be a nonnegative number"),
    ):
        with pytest.raises(ValueError) as caught:
            torchlml.smooth_topk_svm_loss(ROWS, LABELS, 2, **settings)
        assert words in str(caught.value)
        with pytest.raises(ValueError):
            torchlml.SmoothTopKSVMLoss(2, **settings)
    with pytest.raises(ValueError, match="`alpha`"):
        torchlml.topk_svm_loss(ROWS, LABELS, 2, alpha=-1.0)


@pytest.mark.parametrize("bound", ["at_most", "at_least"])
def test_bound_applies_to_every_format_of_target(bound):
    x, y = torch.randn(6, 9, dtype=torch.float64) * 2, torch.randint(9, (6,))
    observed = F.one_hot(y, 9).bool()
    expected = -torchlml.log_lml(x, 4, bound=bound)[observed]
    assert (expected - torchlml.lml_loss(x, y, 4, reduction="none")).abs().max() > 1e-3
    for logits, target, settings in (
        (x, y, {}),
        (x, y[:, None], {}),
        (x, observed, {}),
        (x.flatten(), observed.flatten().nonzero().flatten(), {"offsets": torch.arange(7) * 9}),
    ):
        same(torchlml.lml_loss(logits, target, 4, bound=bound, reduction="none", **settings), expected)
    same(torchlml.LMLLoss(4, bound=bound, reduction="none")(x, y), expected)


@pytest.mark.parametrize(
    "target", [torch.randint(9, (8,)), torch.rand(8, 9) < 0.3, torch.rand(8, 18)[:, ::2]]
)
def test_a_target_may_have_any_memory_layout(target):
    x = torch.randn(4, 9, dtype=torch.float64)
    strided = target[::2]
    assert not strided.is_contiguous()
    assert torch.equal(
        torchlml.lml_loss(x, strided, 3),
        torchlml.lml_loss(x, strided.clone(memory_format=torch.contiguous_format), 3),
    )
