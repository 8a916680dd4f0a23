"""The top-k SVM loss and its smooth version (Berrada, Zisserman and Kumar, 2018).

The smooth loss is computed without overflow at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from torchlml._arguments import Canonical, canonical, check_integer_k, check_number, readable
from torchlml._autograd.loss import Reduction, check_reduction, reduce_losses
from torchlml._rows import wide_dtype, work_dtype
from torchlml._targets import Labels, read_single_label
from torchlml.losses.base import TopKLoss
from torchlml.projection import lml_dual

# Up to about this many coefficients, direct sums of products are faster than FFTs (measured on a CPU).
_DIRECT = 16
_EVEN = 64


def topk_svm_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    alpha: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the top-k hinge loss, a margin loss between the label and the k-th largest other logit.

        >>> logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> torchlml.topk_svm_loss(logits, torch.tensor([2]), k=2)  # 1 + (2 - 1) / 2
        tensor(1.5000)

    Args:
        logits: a tensor of shape (..., n).
        target: one class index per row, as an int64 or uint8 tensor of shape (...).
        k: the number of allowed guesses, from 1 to n - 1.
        alpha: the margin.
        weight: one weight per class, which multiplies the loss of the rows with that label.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        mask: a bool tensor that broadcasts to the shape of the logits. Entries that are False are ignored.

    Returns:
        The loss in the dtype of the logits (float32 for half-precision logits under autocast): a scalar, or
        one number per row with the reduction "none".

    For logits s and label y, the loss is defined as max(0, alpha + A - B). A is the mean of the k largest s_j
    with j != y, and B is the mean of s_y and the k - 1 largest s_j with j != y. The k - 1 largest s_j cancel,
    which leaves

        max(0, alpha + (s_(k) - s_y) / k),   where s_(k) is the k-th largest s_j with j != y.

    The loss is 0 if s_y exceeds s_(k) by at least alpha * k. It is the limit of `smooth_topk_svm_loss` as tau
    goes to 0. At most two classes in a row have a nonzero gradient, whereas the smooth loss has a nonzero
    gradient for every class.
    """
    check_reduction(reduction)
    check_number(alpha, "alpha", "a nonnegative number", 0)
    k = check_integer_k(k)
    c, labels, *apart = _read("topk_svm_loss", logits, target, k, weight, ignore_index, mask)
    own, others = (t.to(work_dtype(t.dtype)) for t in apart)
    top = others.topk(k, dim=-1).values
    loss = (alpha + (top[:, -1:] - own) / k).relu()
    # topk treats NaN as the largest value, so a NaN anywhere in the row is the first of the k, not the k-th.
    loss = torch.where(top[:, :1].isnan(), torch.nan, loss)
    return _reduce(loss, labels, reduction, c)


class TopKSVMLoss(TopKLoss):
    """`topk_svm_loss` as a module, with the same arguments.

    >>> torchlml.TopKSVMLoss(k=2)(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([2]))
    tensor(1.5000)
    """

    def __init__(
        self,
        k: int,
        *,
        alpha: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        check_number(alpha, "alpha", "a nonnegative number", 0)
        super().__init__(check_integer_k(k), weight, ignore_index, reduction, alpha=alpha)

    def forward(self, logits: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `topk_svm_loss`."""
        return topk_svm_loss(logits, target, self.k, mask=mask, **self.settings)


def smooth_topk_svm_loss(
    logits: Tensor,
    target: Tensor,
    k: int,
    *,
    tau: float = 1.0,
    alpha: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the top-k hinge loss, smoothed with a temperature.

        >>> logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> torchlml.smooth_topk_svm_loss(logits, torch.tensor([2]), k=2, tau=1.0)
        tensor(1.5886)

    Args:
        tau: the temperature. As it goes to 0, the loss approaches `topk_svm_loss`.
        logits, target, k, alpha, weight, ignore_index, reduction, mask: as for `topk_svm_loss`.

    Returns:
        The loss, with the dtype and shape of the result of `topk_svm_loss`.

    For logits s and label y, the loss is defined as

        tau * log(sum_A exp((alpha * [y not in A] + sum_{j in A} s_j / k) / tau))
        - tau * log(sum_{A with y} exp(sum_{j in A} s_j / (k * tau))),

    where sum_A is over all sets A of k classes, and sum_{A with y} is over those that contain y. Let E_i be
    the i-th elementary symmetric polynomial of exp(s_j / (k * tau)) over the classes j != y. The loss is then

        tau * softplus((alpha - s_y / k) / tau + log(E_k / E_{k-1})),

    so only the ratio E_k / E_{k-1} is needed. For any nu, let S be the number of successes among independent
    Bernoulli variables with probabilities sigmoid(s_j / (k * tau) + nu). Then

        log(E_k / E_{k-1}) = log(P[S = k] / P[S = k-1]) - nu.

    With the nu from `lml_dual` for which the mean of S is k - 1/2, both probabilities are at the peak of the
    distribution, so there is no overflow or cancellation at any temperature.
    """
    check_reduction(reduction)
    _check_settings(tau, alpha)
    k = check_integer_k(k)
    c, labels, *apart = _read("smooth_topk_svm_loss", logits, target, k, weight, ignore_index, mask)
    # The gradients are differences of two probabilities. float64 keeps them accurate and costs little here.
    own, others = (t.to(wide_dtype(t.device)) for t in apart)
    if k * tau != 1:
        own, others = own / (k * tau), others / (k * tau)
    ratio = log_ratio(others, k)
    loss = -tau * logsigmoid(own - ratio.unsqueeze(-1) - alpha / tau)
    return _reduce(loss, labels, reduction, c)


class SmoothTopKSVMLoss(TopKLoss):
    """`smooth_topk_svm_loss` as a module, with the same arguments.

    >>> torchlml.SmoothTopKSVMLoss(k=2)(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([2]))
    tensor(1.5886)
    """

    def __init__(
        self,
        k: int,
        *,
        tau: float = 1.0,
        alpha: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        _check_settings(tau, alpha)
        super().__init__(check_integer_k(k), weight, ignore_index, reduction, tau=tau, alpha=alpha)

    def forward(self, logits: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Compute the loss for a batch. The arguments are those of `smooth_topk_svm_loss`."""
        return smooth_topk_svm_loss(logits, target, self.k, mask=mask, **self.settings)


def _read(
    name: str,
    logits: Tensor,
    target: Tensor,
    k: int,
    weight: Tensor | None,
    ignore_index: int,
    mask: Tensor | None,
) -> tuple[Canonical, Labels, Tensor, Tensor]:
    """Return the rows, the labels, the logits of the labels (R, 1), and the logits of all other classes.

    The last tensor has shape (R, n), with -inf for the label and for masked classes. `name` is the name of
    the loss, for error messages.
    """
    c = canonical(logits, k, -1, mask, None, any_k=True, name="logits", nested=True)
    labels, place = read_single_label(c, target, weight, ignore_index, name)
    check_integer_k(k, c.x.shape[-1] - 1)
    x = c.x if labels.complete else c.x.masked_fill(~labels.has_label.unsqueeze(-1), 0)
    others = x if c.mask is None else x.masked_fill(~c.mask, -torch.inf)
    return c, labels, x.gather(-1, place), others.scatter(-1, place, -torch.inf)


def _reduce(loss: Tensor, labels: Labels, reduction: Reduction, c: Canonical) -> Tensor:
    """Weight and reduce a loss (R, 1), which becomes 0 for rows without a label."""
    if not labels.complete:
        loss = torch.where(labels.has_label.unsqueeze(-1), loss, 0)
    if labels.weight is not None:
        loss = loss * labels.weight
    return reduce_losses(loss.squeeze(-1), labels, None, reduction, c)


def log_ratio(x: Tensor, k: int) -> Tensor:
    """Compute log(E_k / E_{k-1}) for each row of x (R, n).

    E_k is the k-th elementary symmetric polynomial of the row's entries of exp(x). The result is -inf if
    fewer than k entries exceed -inf, and +inf if at least k entries are +inf.
    """
    n = x.shape[-1]
    if x.shape[0] == 0:
        return x.sum(-1)  # torch raises an error for the FFT of an empty tensor
    if k == 1:
        return _log_sum_exp(x)  # E_0 is 1
    # The result does not depend on nu, so nu needs no derivative.
    nu = lml_dual(x.detach(), k - 0.5)
    ordinary = nu.isfinite()
    z = x + torch.where(ordinary, nu, 0).unsqueeze(-1)
    success, failure = torch.sigmoid(z), torch.sigmoid(-z)
    # `_chances` returns P[S = 0], P[S = 1] and so on for the number S of successes among the columns.
    if 2 * k <= n:
        less, more = _chances(success, failure, k)[:, k - 1 :].unbind(-1)
    else:
        # S = k and n - S = n - k are the same event, and the second needs fewer coefficients.
        more, less = _chances(failure, success, n - k + 1)[:, n - k :].unbind(-1)
    more, less = (torch.where(ordinary, chance, 1) for chance in (more, less))
    return torch.where(ordinary, more.log() - less.log(), 0) - nu


def _log_sum_exp(x: Tensor) -> Tensor:
    """Compute `x.logsumexp(-1)`, but with a gradient of 0 instead of NaN if the result is infinite."""
    largest = x.detach().amax(-1)
    ordinary = largest.isfinite()
    z = x - torch.where(ordinary, largest, 0).unsqueeze(-1)
    if not (readable(ordinary) and bool(ordinary.all())):
        z = z.clamp(max=0)  # z exceeds 0 only in rows that are not ordinary
    total = z.exp_().sum(-1)
    return torch.where(ordinary, total, 1).log() + largest


def _chances(success: Tensor, failure: Tensor, k: int) -> Tensor:
    """Multiply the polynomials failure + success * t pairwise, dropping powers above k, until one is left.

    The result contains the coefficients of the powers 0 to k, with shape (R, k + 1).
    """
    columns = success.shape[1]
    if columns > _EVEN:  # pad to a multiple of 64, so that odd counts occur only later, when copying is cheap
        spare = (0, -columns % _EVEN)
        success, failure = pad(success, spare), pad(failure, spare, value=1)
    # One tensor (polynomials, R) for each power.
    powers = [failure.t().contiguous(), success.t().contiguous()]
    while powers[0].shape[0] > 1 and len(powers) <= _DIRECT:
        if powers[0].shape[0] % 2:  # pad with a variable that always fails: the polynomial 1
            powers = [pad(power, (0, 0, 0, 1), value=float(i == 0)) for i, power in enumerate(powers)]
        firsts, seconds = zip(*(power.chunk(2) for power in powers), strict=True)
        powers = [_convolve(firsts, seconds, i) for i in range(min(2 * len(powers) - 1, k + 1))]
    chances = torch.stack(powers, dim=-1).transpose(0, 1)  # (R, polynomials, powers)
    while chances.shape[1] > 1:
        count, width = chances.shape[1:]
        if count % 2:
            one = torch.eye(1, width, dtype=chances.dtype, device=chances.device)
            chances = torch.cat((chances, one.expand(chances.shape[0], 1, width)), dim=1)
        # A power of two, at least the length of the product, so that the circular convolution does not wrap
        # around.
        length = 1 << (2 * width - 2).bit_length()
        first, second = torch.fft.rfft(chances, length).unflatten(1, (2, -1)).unbind(1)
        chances = torch.fft.irfft(first * second, length)[..., : min(2 * width - 1, k + 1)]
    chances = chances.squeeze(1)
    return pad(chances, (0, k + 1 - chances.shape[-1]))


def _convolve(a: Sequence[Tensor], b: Sequence[Tensor], power: int) -> Tensor:
    """Compute the coefficient of one power in the product of two polynomials."""
    total: Tensor | None = None
    for i in range(max(0, power - len(b) + 1), min(power, len(a) - 1) + 1):
        total = a[i] * b[power - i] if total is None else torch.addcmul(total, a[i], b[power - i])
    assert total is not None
    return total


def _check_settings(tau: float, alpha: float) -> None:
    check_number(tau, "tau", "a positive number")
    if not 0 < tau < float("inf"):
        raise ValueError(
            f"`tau` must be a positive number, but it is {tau}; for the limit tau = 0, use `topk_svm_loss`."
        )
    check_number(alpha, "alpha", "a nonnegative number", 0)
