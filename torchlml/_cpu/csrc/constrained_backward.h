// The derivatives of the projections onto {0 <= y <= upper, sum(y) = k}.
//
// A small change in the inputs changes an entry of y by w * (change in x + change in nu) + b * (change in upper). Here
// w is dy/dz at z = x + nu, and b is 1 if the entry is at its upper bound and 0 otherwise. nu changes so that the sum
// of y changes by the same amount as k. For an incoming gradient g, the gradients are therefore
//   dk = sum(w * g) / sum(w),  dx = w * (g - dk)  and  d_upper = b * (g - dk).
#pragma once

#include "constrained.h"

namespace torchlml {
namespace {

template <class T>
struct Slope {
  Vec<T> weight;
  Mask<T> at_bound;
};

template <class T>
LML_INLINE Slope<T> slope_of(Vec<T> z, Vec<T> bound, bool sparsemax) {
  if (sparsemax) {
    const Mask<T> over = greater(z, bound);
    return {keep<T>(greater(z, T{0}) & ~over, splat(T{1})), over};
  }
  const Vec<T> y = vexp(vmin(splat(sizeof(T) == 4 ? T(80) : T(700)), z));
  const Mask<T> over = greater(y, bound * edge<T>) | ~greater(bound, T{0});
  return {keep<T>(~over, y), over};
}

struct EntrySlope {
  double weight;
  bool at_bound;
};

template <class S>
struct ConstrainedBackwardRow {
  using T = typename Work<S>::type;
  const ConstrainedRow<S> row;
  const S* grad;
  T high, low;
  S* dx;
  double* dk;
  double* d_upper;  // one value per entry of the row, or one value for the row, or null

  void fill(T value) const {
    for (int64_t i = 0; i < row.n; ++i) store_one(dx + i, value);
    *dk = static_cast<double>(value);
    if (!d_upper) return;
    for (int64_t i = 0; i < (row.stride ? row.n : 1); ++i) d_upper[i] = static_cast<double>(value);
  }

  LML_INLINE Vec<T> z_at(int64_t i, int64_t count) const { return (read(row.x + i, count) + high) + low; }

  // Handles finite rows without a mask. The first pass stores w in `work`. Returns false if an entry is not finite.
  template <class Bounds>
  LML_INLINE bool plain(const Bounds& bounds, T* work) const {
    const int64_t n = row.n;
    const bool sparsemax = row.sparsemax;
    BlockSum<T> weights, moments;
    Vec<T> check{};
    each_vector_in_blocks<T, short_block>(
        n,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          Vec<T> z = z_at(i, count);
          if (count < lanes<T>) z = select<T>(first_lanes<T>(count), z, splat(T{-1000}));
          check += z;
          const Vec<T> w = slope_of<T>(z, bounds.at(i, count), sparsemax).weight;
          write(work + i, w, count);
          weights.block += w;
          moments.block += w * keep<T>(greater(w, T{0}), read(grad + i, count));
        },
        [&]() __attribute__((always_inline)) { weights.flush(), moments.flush(); });
    const double sum = weights.value(), ends = total(widen(check));
    if (!(ends - ends == 0)) return false;
    *dk = sum > 0 ? moments.value() / sum : 0;
    const T shift = static_cast<T>(*dk);
    if (d_upper) bound_gradient(bounds, shift);
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> w = read(work + i, count);
      write(dx + i, keep<T>(greater(w, T{0}), w * (read(grad + i, count) - shift)), count);
    });
    return true;
  }

  template <class Bounds>
  void bound_gradient(const Bounds& bounds, T shift) const {
    double sum = 0;
    each_vector<T>(row.n, [&](int64_t i, int64_t count) {
      const Slope<T> slope = slope_of<T>(z_at(i, count), bounds.at(i, count), row.sparsemax);
      const Vec<T> felt = keep<T>(slope.at_bound, read(grad + i, count) - shift);
      for (int64_t j = 0; j < count; ++j) {
        if (Bounds::one) {
          sum += static_cast<double>(felt[j]);
        } else {
          d_upper[i + j] = static_cast<double>(felt[j]);
        }
      }
    });
    if (Bounds::one) *d_upper = sum;
  }

  // Handles masks, infinities and rows without a finite nu.
  void general() const {
    const T infinity = static_cast<T>(HUGE_VAL);
    if (high != high) return fill(high);
    const auto value = [&](int64_t i) { return row.available(i) ? load_one(row.x + i) : -infinity; };
    const auto gradient = [&](int64_t i) { return static_cast<double>(load_one(grad + i)); };
    double held = 0;
    int64_t infinite = 0;
    for (int64_t i = 0; i < row.n; ++i) {
      if (value(i) == infinity) held += row.upper[i * row.stride], ++infinite;
    }
    const bool shared = infinite > 0 && held >= row.k;
    // Returns w for an entry, and whether the entry is at its bound.
    const auto slope = [&](int64_t i) {
      const T a = value(i);
      if (a == -infinity || (shared && a < infinity) || high == -infinity) return EntrySlope{0, false};
      if ((a == infinity && !shared) || high == infinity) return EntrySlope{0, true};
      const Vec<T> z = splat((shared ? high : a + high) + low), u = splat(static_cast<T>(row.upper[i * row.stride]));
      const Slope<T> at = slope_of<T>(z, u, row.sparsemax);
      return EntrySlope{static_cast<double>(at.weight[0]), at.at_bound[0] != 0};
    };
    double sum = 0, moment = 0;
    for (int64_t i = 0; i < row.n; ++i) {
      const double w = slope(i).weight;
      if (w > 0) sum += w, moment += w * gradient(i);
    }
    *dk = sum > 0 ? moment / sum : 0;
    if (d_upper && !row.stride) *d_upper = 0;
    for (int64_t i = 0; i < row.n; ++i) {
      const auto [w, at_bound] = slope(i);
      const double felt = w > 0 || at_bound ? gradient(i) - *dk : 0;
      // At an entry of +inf, y depends on k, but not on finite changes in x.
      store_one(dx + i, static_cast<T>(shared ? 0 : w * felt));
      if (d_upper && row.stride) d_upper[i] = at_bound ? felt : 0;
      if (d_upper && !row.stride && at_bound) *d_upper += felt;
    }
  }
};

template <class S>
void constrained_backward_rows(const ConstrainedBackwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> room, bound_room;
  const ConstrainedProblem& problem = args.problem;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(problem.batch, r);
    double* d_upper = args.d_upper ? args.d_upper + (problem.upper_stride ? span.begin : r) : nullptr;
    const ConstrainedBackwardRow<S> back{constrained_row<S>(problem, r),
                                         part_of<S>(args.grad, span),
                                         static_cast<T>(args.nu[r]),
                                         static_cast<T>(args.nu[problem.batch.rows + r]),
                                         part_of<S>(args.dx, span),
                                         args.dk + r,
                                         d_upper};
    const ConstrainedRow<S>& row = back.row;
    T* work = room.room_in(back.dx, row.n);
    bool done = false;
    if (!row.mask && back.high - back.high == 0) {
      if (row.stride == 0) {
        done = back.plain(OneBound<T>{static_cast<T>(*row.upper)}, work);
      } else {
        T* bounds = bound_room.room(row.n);
        for (int64_t i = 0; i < row.n; ++i) bounds[i] = static_cast<T>(row.upper[i]);
        done = back.plain(EachBound<T>{bounds}, work);
      }
    }
    if (!done) back.general();
  }
}

}  // namespace
}  // namespace torchlml
