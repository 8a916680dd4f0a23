"""An interval that is proven to hold the dual variable nu, the root of sum sigmoid(x + nu) = k."""

from __future__ import annotations

from torch import Tensor


def order_offsets(k: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """The saturation offsets that make the paper's interval a theorem.

    For a row with m available entries, pi its entries in descending order, and any real 0 < k < m,

        -pi_{ceil k} - below  <=  nu  <=  -pi_{floor k + 1} + above.

    The paper takes 7 for both, a heuristic that fails for zeros(1098) and k = 1097, where nu is
    log(1097) = 7.0003. At the lower end the entries before rank j = ceil k add at most 1 each, and the other
    m - j + 1 add at most sigmoid(-below) each, which `below` makes add up to k. The upper end is the mirror
    image. For an integer k the two are log(m - k) and log(k).

    Args:
        k: the target sums, one per row.
        m: the number of available entries of each row.

    Returns:
        (below, above), one number per row each.
    """
    rank = k.ceil()
    below = ((m - rank + 1) / (k - rank + 1) - 1).log()
    above = (k / (k.floor() + 1 - k)).log()
    return below, above
