// Finds nu for the projections onto {0 <= y <= upper, sum(y) = k}, for finite entries and 0 < k < sum(upper).
//
// Between the values of nu at which an entry reaches a bound, the sum is linear in nu (sparsemax) or in exp(nu)
// (softmax). A step of Newton's method is therefore exact if it does not change which entries are at a bound. Rows that
// take too many steps are solved by the slow solver in careful_constrained.cpp.
#pragma once

#include "backward.h"

namespace torchlml {
namespace {

// The bounds of a row: one bound for all entries, or one bound per entry.
template <class T>
struct OneBound {
  static constexpr bool one = true;
  T all;
  LML_INLINE Vec<T> at(int64_t, int64_t) const { return splat(all); }
  LML_INLINE T of(int64_t) const { return all; }
  Threshold careful(const T* x, int64_t n, double k, bool sparsemax) const {
    return careful_constrained(x, &all, 0, n, k, sparsemax);
  }
};
template <class T>
struct EachBound {
  static constexpr bool one = false;
  const T* each;
  LML_INLINE Vec<T> at(int64_t i, int64_t count) const { return read(each + i, count); }
  LML_INLINE T of(int64_t i) const { return each[i]; }
  Threshold careful(const T* x, int64_t n, double k, bool sparsemax) const {
    return careful_constrained(x, each, 1, n, k, sparsemax);
  }
};

// The sums at one nu: the number of entries above their bounds, the number of free entries (between 0 and their
// bounds), the sum of the bounds that are exceeded, and the sum of the free entries.
struct Level {
  int64_t over, free;
  double taken, sum;
};

template <class T, class Bounds>
struct LevelSums {
  Mask<T> over{}, free{};
  vdouble taken{};
  BlockSum<T> sum;

  LML_INLINE void add(Mask<T> is_over, Mask<T> is_free, Vec<T> a, Vec<T> bound) {
    over += is_over;
    free += is_free;
    sum.block += keep<T>(is_free, a);
    // The free entries must sum to k minus `taken`, so `taken` must be accurate to the last digit.
    if constexpr (!Bounds::one) taken += widen(keep<T>(is_over, bound));
  }
  LML_INLINE Level level(const Bounds& bounds) {
    const int64_t count = -total_lanes(over);
    double full;
    if constexpr (Bounds::one) {
      full = static_cast<double>(count) * static_cast<double>(bounds.all);
    } else {
      full = total(taken);
    }
    return {count, -total_lanes(free), full, sum.value()};
  }
};

// The number of vectors in a block, which is small enough for accurate sums in float.
constexpr int64_t short_block = 16;

// In the backward pass, an entry that reaches its bound only up to rounding counts as free, because it may be the only
// entry that depends on k.
template <class T>
constexpr T edge = sizeof(T) == 4 ? T(1 + 1e-6) : T(1 + 4e-15);

// The softmax search stores e = exp(x - center) and finds the factor s for which sum(min(upper, e * s)) = k.
//
// Error bound. Let p be e * s as rounded, and t = min(p, upper - p) for the entries below their bounds. If s grows by a
// factor of 1 + d, the sum grows by at least d * sum(t), because each of these entries can grow by t. If s shrinks by a
// factor of 1 - d, the sum falls by at least d * sum(p). The residual r = sum(min(upper, p)) - k therefore bounds the
// relative error of s by -r / sum(t) or r / sum(p), regardless of how many entries are close to their bounds. This
// requires a residual that is accurate relative to sum(t), so an entry above half of its bound is counted as its exact
// bound minus t. Blocks of 8 floats add an error of at most 3.5 * eps * sum(t). Rounding p is equivalent to changing e
// by eps / 2. If e has a relative error of a, the relative error of y is at most
//   2 * a + eps (p is rounded here and in y) + 3.5 * eps (sums) + 3 * eps (`fine`, or the width of the bracket).
// In float32, a <= 4.9e-7: 2.5e-7 from vexp (measured), and 2.4e-7 from x - center, half of the spacing of floats below
// 8, because |log s| < 8 (`centered`). With eps = 1.2e-7, the error is below 1.9e-6 * y.
template <class T, class Bounds>
class SoftmaxSearch {
  static constexpr T unscale = 1 / Stored::scale(T{});
  static constexpr double eps = sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;
  static constexpr double fine = (sizeof(T) == 4 ? 2 : 64) * eps;  // in float64, the sums have no extra precision

 public:
  double factor = unscale;  // representable in T during the search

  template <class S>
  LML_INLINE SoftmaxSearch(const S* x, int64_t n, double k, const Bounds& bounds, double guess, T* e)
      : n_(n), k_(k), center_(static_cast<T>(-guess)), bounds_(bounds), e_(e) {
    Vec<T> check{};
    const T c = center_;
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> z = read(x + i, count) - c;
      check += count == lanes<T> ? z : keep<T>(first_lanes<T>(count), z);
      write(e + i, vexp<Stored>(vmin(splat(Limits<T>::top), z)), count);
    });
    const double sum = total(widen(check));
    finite_ = sum - sum == 0;
  }
  bool finite() const { return finite_; }
  Threshold nu() const { return {static_cast<double>(center_), ::log(factor / static_cast<double>(unscale))}; }
  bool centered() const { return factor > unscale * ::exp(-8.0) && factor < unscale * ::exp(8.0); }

  // The sum is concave in s, so the root of a tangent is never above the true root. Newton's method converges from
  // below, and it has converged once the sum is no longer below k.
  bool solve() {
    const double smallest = unscale * 1e-7, largest = unscale * 1e7;
    const double rounding = 0x1p-50 * k_;  // rounding error of the sums of bounds
    double low = 0, high = HUGE_VAL;
    for (int pass = 0; pass < 24; ++pass) {
      const Filled at = filled(static_cast<T>(factor));
      const double proven = fine * (at.excess > 0 ? at.free : at.slack) + rounding;
      // If the entries at their bounds already sum to k (`rest` is 0), the search continues until one of them falls
      // below its bound, because that entry depends on k.
      if (at.rest > 1e-20 && (at.excess > 0 ? at.excess : -at.excess) <= proven) {
        // The last Newton step ends between the current point and the root, or at most as far below the root as the
        // current point is above it.
        if (at.free > 0) factor *= at.rest / at.free;
        return true;
      }
      (at.excess > 0 ? high : low) = factor;
      if (high <= low * (1 + 1.5 * fine)) return true;
      const double root = at.rest > 0 && at.free > 0 ? rounded(factor * at.rest / at.free) : 0;
      if (root > 0 && root >= low && root < high && (pass < 12 || pass % 2 || !(high < HUGE_VAL))) {
        // Take a step that is long enough to change p. After a shorter step, the computed sum might not change.
        const double least = factor * (1 + fine);
        factor = at.excess < 0 && root < least ? rounded(least) : root;
        low = root;
      } else if (high < HUGE_VAL) {
        factor = rounded(low > 0 ? ::sqrt(low * high) : high * (pass < 2 ? 0.5 : 0.1));
      } else {
        return false;
      }
      if (!(factor > smallest && factor < largest)) return false;
    }
    return false;
  }

 private:
  static double rounded(double s) { return static_cast<double>(static_cast<T>(s)); }

  // The sums at one factor: sum(min(upper, p)) - k, sum(t), the sum of p over the entries below their bounds, and k
  // minus the bounds of the other entries.
  struct Filled {
    double excess, slack, free, rest;
  };

  __attribute__((noinline)) Filled filled(T s) const {
    const T* e = e_;
    const Bounds bounds = bounds_;
    Mask<T> near_count{}, full_count{};
    LongSum<T> near_bounds, full_bounds;  // subtracted from k, so they must be accurate to the last digit
    BlockSum<T> gaps, low;
    each_vector_in_blocks<T, short_block / 2>(
        n_,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          const Vec<T> u = bounds.at(i, count), p = vmin(read(e + i, count) * s, u);
          const Mask<T> near = greater(p, u * T(0.5)), full = ~greater(u, p);
          gaps.block += keep<T>(near, u - p);
          low.block += keep<T>(~near, p);
          if constexpr (Bounds::one) {
            near_count += near;
            full_count += full;
          } else {
            Vec<T> at_near = keep<T>(near, u), at_full = keep<T>(full, u);
            near_bounds.take(at_near);
            full_bounds.take(at_full);
          }
        },
        [&]() __attribute__((always_inline)) { gaps.flush(), low.flush(); });
    double near, full;
    if constexpr (Bounds::one) {
      near = -static_cast<double>(total_lanes(near_count)) * static_cast<double>(bounds.all);
      full = -static_cast<double>(total_lanes(full_count)) * static_cast<double>(bounds.all);
    } else {
      near = total(near_bounds.sum);
      full = total(full_bounds.sum);
    }
    const double gap = gaps.value(), small = low.value();
    return {(near - k_) + (small - gap), small + gap, small + (near - full) - gap, k_ - full};
  }

  int64_t n_;
  double k_;
  T center_;
  Bounds bounds_;
  T* e_;
  bool finite_;
};

// nu split into two numbers, with z = (x + high) + low. The sum x + high is exact near the threshold.
template <class T>
struct Split {
  T high, low;
  explicit Split(const Threshold& nu) {
    high = static_cast<T>(nu.delta - nu.center);
    low = static_cast<T>((-nu.center - static_cast<double>(high)) + nu.delta);
  }
};

// The sparsemax search finds the nu for which sum(clip(x + nu, 0, upper)), which is piecewise linear in nu, is k.
template <class S, class Bounds>
class SparsemaxSearch {
  using T = typename Work<S>::type;

 public:
  LML_INLINE SparsemaxSearch(const S* x, int64_t n, double k, const Bounds& bounds, double guess, double unit)
      : n_(n), k_(k), unit_(unit), x_(x), bounds_(bounds), nu_{static_cast<double>(static_cast<T>(-guess)), 0} {
    Vec<T> check{};
    const T c = static_cast<T>(nu_.center);
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> z = read(x + i, count) - c;
      check += count == lanes<T> ? z : keep<T>(first_lanes<T>(count), z);
    });
    const double sum = total(widen(check));
    finite_ = sum - sum == 0;
  }
  bool finite() const { return finite_; }
  const Threshold& nu() const { return nu_; }

  bool solve() {
    double place = 0, low = -HUGE_VAL, high = HUGE_VAL;  // relative to the initial guess
    bool rooted = false;
    Level last{-1, -1, 0, 0};
    for (int pass = 0; pass < 32; ++pass) {
      const Level at = level();
      const double excess = (at.taken - k_) + at.sum;
      if (excess == 0) return true;
      if (rooted && at.over == last.over && at.free == last.free) {
        // The previous step was computed from the sums at a different nu. This step corrects its rounding error.
        move(-excess / static_cast<double>(at.free));
        return true;
      }
      (excess > 0 ? high : low) = place;
      double step;
      if (at.free > 0) {
        step = -excess / static_cast<double>(at.free);
      } else {
        // The sum is constant near nu, so move to the next nu at which an entry changes it, and slightly beyond.
        const double size = excess > 0 ? excess : -excess, into = 0.5 * (size < unit_ ? size : unit_);
        step = excess > 0 ? -(gap<true>() + into) : gap<false>() + into;
      }
      rooted = at.free > 0;
      last = at;
      if (!(place + step > low && place + step < high) || (pass > 8 && pass % 2)) {
        if (!(high - low < HUGE_VAL)) return false;
        step = 0.5 * (low + high) - place;
        if (!(place + step > low && place + step < high)) return false;
        rooted = false;
      }
      place += step;
      move(step);
    }
    return false;
  }

 private:
  // Moves the center and keeps its rounding error in delta, so that the last step is exact even far from the initial
  // guess.
  void move(double step) {
    const double shift = nu_.delta + step, center = nu_.center - shift, part = center - nu_.center;
    nu_ = {center, -((nu_.center - (center - part)) - (shift + part))};
  }

  // Returns z for one vector, with -1 past the end of the row.
  LML_INLINE Vec<T> z_at(const Split<T>& nu, int64_t i, int64_t count) const {
    const Vec<T> z = (read(x_ + i, count) + nu.high) + nu.low;
    return count == lanes<T> ? z : select<T>(first_lanes<T>(count), z, splat(T{-1}));
  }

  __attribute__((noinline)) Level level() const {
    const Split<T> nu(nu_);
    const Bounds bounds = bounds_;
    LevelSums<T, Bounds> sums;
    each_vector_in_blocks<T, short_block>(
        n_,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          const Vec<T> z = z_at(nu, i, count), u = bounds.at(i, count);
          const Mask<T> over = greater(z, u);
          sums.add(over, greater(z, T{0}) & ~over, z, u);
        },
        [&]() __attribute__((always_inline)) { sums.sum.flush(); });
    return sums.level(bounds);
  }

  // Returns how far nu must move until the next entry leaves its bound: the upper bound if `down`, otherwise the lower
  // bound 0.
  template <bool down>
  __attribute__((noinline)) double gap() const {
    const Split<T> nu(nu_);
    Vec<T> least = splat(static_cast<T>(HUGE_VAL));
    each_vector<T>(n_, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> z = z_at(nu, i, count), far = down ? z - bounds_.at(i, count) : -z;
      Mask<T> there = ~greater(Vec<T>{}, far);
      if (count < lanes<T>) there &= first_lanes<T>(count);
      least = vmin(select<T>(there, far, least), least);
    });
    T out = least[0];
    for (int j = 1; j < lanes<T>; ++j) out = least[j] < out ? least[j] : out;
    return static_cast<double>(out);
  }

  int64_t n_;
  double k_, unit_;
  const S* x_;
  Bounds bounds_;
  Threshold nu_;
  bool finite_;
};

}  // namespace
}  // namespace torchlml
