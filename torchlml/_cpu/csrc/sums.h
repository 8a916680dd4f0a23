// Sums over a row of finite entries at one nu: sum(y) and its derivatives, in blocks that are accumulated in double.
#pragma once

#include "rows.h"
#include "vmath.h"

namespace torchlml {
namespace {

// Sums over a row at one nu. part[0] is accumulated in double after every `flush` vectors.
template <class T, int parts, int vectors>
struct Parts {
  static constexpr int size = parts, flush = vectors;
  Vec<T> part[size] = {};
  Mask<T> above{};  // minus the number of entries with z > 0, if the derived class counts them
};

// The sums of y and its derivatives w = y * (1 - y) and w * (1 - 2 * y). They are accurate enough for the first step.
template <class T>
struct Sums : Parts<T, 3, 32> {
  using Parts<T, 3, 32>::part;
  LML_INLINE void add(Vec<T> odds) {
    const Vec<T> r = reciprocal<true>(1 + odds), y = odds * r, w = y * r;
    part[0] += y;
    part[1] += w;
    part[2] += w * (r - y);
  }
};

// Let t = sigmoid(-|z|), and s = -1 if z > 0, else 1. This class sums s * t instead of y, and counts the entries with
// z > 0. The residual (number of z > 0) - k + sum(s * t) is accurate relative to sum(t), even if y rounds to 1.
template <class T>
struct SignedSums : Parts<T, 3, 16> {
  using Parts<T, 3, 16>::part, Parts<T, 3, 16>::above;
  LML_INLINE void add(Vec<T> odds) {
    const Vec<T> r = reciprocal<true>(1 + odds), y = odds * r, w = y * r;
    const Mask<T> over = greater(odds, T{1});
    part[0] += negate_where<T>(over, vmin(y, r));
    part[1] += w;
    part[2] += w * (r - y);
    above += over;
  }
};

// Used for rows in which sum(y) is nearly a staircase function of nu. With s and t as in SignedSums, this class also
// computes sum(t) and sum(s * w), which separate the two sides of a gap.
template <class T>
struct TwoSidedSums : Parts<T, 5, 16> {
  using Parts<T, 5, 16>::part, Parts<T, 5, 16>::above;
  LML_INLINE void add(Vec<T> odds) {
    const Vec<T> r = reciprocal<true>(1 + odds), y = odds * r, w = y * r, t = vmin(y, r);
    const Mask<T> over = greater(odds, T{1});
    part[0] += negate_where<T>(over, t);
    part[1] += w;
    part[2] += w * (r - y);
    part[3] += t;
    part[4] += negate_where<T>(over, w);
    above += over;
  }
};

// A sum in double. If T is double, the sum is compensated, because every addition may round in the same direction, for
// example if a million equal entries are added.
template <class T>
struct LongSum {
  vdouble sum{}, carry{};
  LML_INLINE void take(Vec<T>& part) {
    const vdouble a = widen(part);
    if constexpr (sizeof(T) == 8) {
      const vdouble b = a - carry, next = sum + b;
      carry = (next - sum) - b;
      sum = next;
    } else {
      sum += a;
    }
    part = Vec<T>{};
  }
};

// Computes sums of the given kind over n entries. `odds(i)` returns exp(z) for the i-th full vector, and `odds_tail()`
// returns exp(z) for the remaining entries, padded with zeros. `prepare(i)` is called for all vectors of a block before
// their odds are read: two short loops overlap far better than one loop with both dependency chains.
template <class T, template <class> class Kind, class Prepare, class Odds, class Tail>
LML_INLINE Totals evaluate(int64_t n, const Prepare& prepare, const Odds& odds, const Tail& odds_tail) {
  constexpr int size = Kind<T>::size;
  constexpr int64_t short_block = Kind<T>::flush, long_block = 128;
  const int64_t whole = n / lanes<T>;
  LongSum<T> sum[size];
  Kind<T> block;
  if (n % lanes<T>) block.add(odds_tail());  // flushed with the first block
  int64_t i = 0;
  do {
    const int64_t long_end = whole - i > long_block ? i + long_block : whole;
    do {
      const int64_t end = long_end - i > short_block ? i + short_block : long_end;
      for (int64_t j = i; j < end; ++j) prepare(j);
      for (; i < end; ++i) block.add(odds(i));
      sum[0].take(block.part[0]);
    } while (i < long_end);
    for (int j = 1; j < size; ++j) sum[j].take(block.part[j]);
  } while (i < whole);
  Totals totals{};
  for (int j = 0; j < size; ++j) totals.part[j] = total(sum[j].sum);
  totals.above = -total_lanes(block.above);
  return totals;
}

}  // namespace
}  // namespace torchlml
