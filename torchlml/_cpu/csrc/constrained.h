// The forward pass for one row of the projections onto {0 <= y <= upper, sum(y) = k}.
#pragma once

#include "constrained_solve.h"

namespace torchlml {
namespace {

template <class S, class Y, class Bounds>
LML_INLINE void write_sparsemax(const S* x, int64_t n, const Bounds& bounds, const Threshold& nu, Y* y) {
  using T = typename Work<S>::type;
  const Split<T> at(nu);
  each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec<T> z = (read(x + i, count) + at.high) + at.low;
    write(y + i, vmin(keep<T>(greater(z, T{0}), z), bounds.at(i, count)), count);
  });
}

template <class S, class Y, class Bounds, class T = typename Work<S>::type>
__attribute__((noinline)) void project_carefully(const S* x, int64_t n, double k, const Bounds& bounds, bool sparsemax,
                                                 T* work, Y* y, Threshold& nu) {
  for (int64_t i = 0; i < n; ++i) work[i] = load_one(x + i);
  nu = bounds.careful(work, n, k, sparsemax);
  if (!y) return;
  if (sparsemax) return write_sparsemax(x, n, bounds, nu, y);
  for (int64_t i = 0; i < n; ++i) {
    const double a = ::exp((static_cast<double>(load_one(x + i)) - nu.center) + nu.delta);
    const double u = static_cast<double>(bounds.of(i));
    store_one(y + i, static_cast<T>(a < u ? a : u));
  }
}

// Returns the approximate nu for normally distributed entries with bounds of 1. If y is far below the bounds, lml is
// also nearly exponential, so the guess for lml is used. Otherwise, min(1, exp(z)) is treated as a step at z = -1 that
// is smoothed by a distribution of variance 1.
template <class S>
LML_INLINE double softmax_guess(const S* x, const Target& target) {
  const double part = target.k * target.inverse;
  if (part < 0.1) return guess(x, target);
  const Moments row = moments(x, target);
  const double wide = target.probit * ::sqrt(row.variance + 1) - 1;
  return wide + (::log(part) - wide) * (0.1 / (0.1 + row.variance)) - row.mean;
}

// Computes y and nu for finite entries. The search stores exponentials in `work`, which may be y itself if it has the
// same type. Returns false if the sums are not finite because the row has infinities, NaN or values near 1e38.
template <class S, class Y, class Bounds, class T = typename Work<S>::type>
bool project(const S* x, int64_t n, double k, const Bounds& bounds, double unit, bool sparsemax, Target& target,
             T* work, Y* y, Threshold& nu) {
  target.set(k / unit, n);
  if (!sparsemax) {
    double guess = softmax_guess(x, target) + ::log(unit);
    for (int attempt = 0; attempt < 2; ++attempt) {
      SoftmaxSearch<T, Bounds> search(x, n, k, bounds, guess, work);
      if (!search.finite()) return false;
      if (!search.solve()) break;
      nu = search.nu();
      if (!search.centered()) {
        guess = nu.delta - nu.center;
        continue;
      }
      const T s = static_cast<T>(search.factor);
      if (y) {
        each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          write(y + i, vmin(read(work + i, count) * s, bounds.at(i, count)), count);
        });
      }
      return true;
    }
  } else {
    const Moments row = moments(x, target);
    const double start = target.probit * ::sqrt(row.variance + unit * unit / 12) + unit / 2 - row.mean;
    SparsemaxSearch<S, Bounds> search(x, n, k, bounds, start, unit);
    if (!search.finite()) return false;
    if (search.solve()) {
      nu = search.nu();
      if (y) write_sparsemax(x, n, bounds, nu, y);
      return true;
    }
  }
  project_carefully(x, n, k, bounds, sparsemax, work, y, nu);
  return true;
}

template <class T>
struct ConstrainedScratch {
  Scratch<T> packed, bounds, work;
  Target target;
};

template <class S>
struct ConstrainedRow : Row<S> {
  using typename Row<S>::T;
  using Row<S>::x, Row<S>::mask, Row<S>::n, Row<S>::available;
  double k;
  bool sparsemax;
  const double* upper;
  int64_t stride;  // the stride of `upper`
  S* y;            // may be null
  double* nu_high;
  double* nu_low;

  void set_nu(double high, double low) const { *nu_high = high, *nu_low = low; }
  void set_nu(const Threshold& nu) const {
    const Split<T> split(nu);
    set_nu(static_cast<double>(split.high), static_cast<double>(split.low));
  }
  template <class F>
  void fill(const F& value) const {
    if (!y) return;
    for (int64_t i = 0; i < n; ++i) store_one(y + i, static_cast<T>(value(i)));
  }

  // No entry of y exceeds k, so bounds above 2 * k can be replaced by 2 * k, which is finite.
  T bound(int64_t i) const {
    const double u = upper[i * stride];
    return static_cast<T>(u > 2 * k ? 2 * k : u);
  }

  // Handles finite and feasible rows without a mask. Returns false for all other rows.
  bool plain(ConstrainedScratch<T>& scratch) const {
    if (mask || !(k > 0) || n == 0) return false;
    T* work = scratch.work.room_in(y, n);
    Threshold nu;
    if (stride == 0) {
      const double u = static_cast<double>(bound(0));
      if (!(k < u * static_cast<double>(n))) return false;
      if (!project(x, n, k, OneBound<T>{bound(0)}, u, sparsemax, scratch.target, work, y, nu)) return false;
    } else {
      T* bounds = scratch.bounds.room(n);
      double room = 0, sum = 0;
      for (int64_t i = 0; i < n; ++i) bounds[i] = bound(i), room += upper[i], sum += static_cast<double>(bounds[i]);
      if (!(k < room && k < sum)) return false;
      const double unit = sum / static_cast<double>(n);
      if (!project(x, n, k, EachBound<T>{bounds}, unit, sparsemax, scratch.target, work, y, nu)) return false;
    }
    set_nu(nu);
    return true;
  }

  // Handles masks, infinities, NaN, k <= 0, and rows in which the bounds alone determine y. The finite entries are
  // solved as a separate row.
  void general(ConstrainedScratch<T>& scratch) const {
    T* packed = scratch.packed.room(n);
    T* bounds = scratch.bounds.room(n);
    const T infinity = static_cast<T>(HUGE_VAL);
    const auto value = [&](int64_t i) { return available(i) ? load_one(x + i) : -infinity; };
    bool nan = k != k;
    int64_t infinite = 0;
    double held = 0, finite = 0;  // the sums of the bounds of +inf entries and of finite entries
    for (int64_t i = 0; i < n; ++i) {
      const T a = value(i);
      const double u = upper[i * stride];
      if (a == -infinity) continue;
      nan |= a != a || u != u;
      infinite += a == infinity;
      (a == infinity ? held : finite) += u;
    }
    if (nan) {
      set_nu(NAN, 0);
      return fill([](int64_t) { return static_cast<double>(NAN); });
    }
    if (k <= 0) {
      set_nu(-HUGE_VAL, 0);
      return fill([](int64_t) { return 0.0; });
    }
    // If the bounds of the entries of +inf sum to at least k, these entries share k as if they were tied.
    const bool shared = infinite > 0 && held >= k;
    const auto takes_part = [&](T a) { return shared ? a == infinity : a > -infinity; };
    if (k >= (shared ? held : held + finite)) {
      set_nu(HUGE_VAL, 0);
      return fill([&](int64_t i) { return takes_part(value(i)) ? upper[i * stride] : 0.0; });
    }
    int64_t size = 0;
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const T a = value(i);
      if (!takes_part(a) || (a == infinity && !shared)) continue;
      packed[size] = shared ? 0 : a;
      bounds[size] = bound(i);
      sum += static_cast<double>(bounds[size++]);
    }
    const double rest = shared ? k : k - held;
    const EachBound<T> each{bounds};
    T* work = scratch.work.room(n);
    Threshold nu{0, 0};
    // After rounding, the problem may be infeasible or fully determined by the bounds.
    if (rest > 0 && rest < sum) {
      const double unit = sum / static_cast<double>(size);
      if (!project(packed, size, rest, each, unit, sparsemax, scratch.target, work, work, nu)) {
        project_carefully(packed, size, rest, each, sparsemax, work, work, nu);
      }
    } else {
      for (int64_t i = 0; i < size; ++i) work[i] = rest > 0 ? bounds[i] : 0;
      nu.delta = rest > 0 ? HUGE_VAL : -HUGE_VAL;
    }
    if (nu.delta - nu.delta == 0) {
      set_nu(nu);
    } else {
      set_nu(nu.delta, 0);
    }
    int64_t at = 0;
    fill([&](int64_t i) {
      const T a = value(i);
      if (!takes_part(a)) return 0.0;
      return a == infinity && !shared ? upper[i * stride] : static_cast<double>(work[at++]);
    });
  }
};

template <class S>
ConstrainedRow<S> constrained_row(const ConstrainedProblem& p, int64_t r) {
  const Span span = row_span(p.batch, r);
  return {{p.batch, span}, p.k[r * p.k_stride],
          p.sparsemax,     p.upper + span.begin * p.upper_stride,
          p.upper_stride,  nullptr,
          nullptr,         nullptr};
}

template <class S>
void constrained_forward_rows(const ConstrainedForwardArgs& args, const Rows& rows) {
  ConstrainedScratch<typename Work<S>::type> scratch;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    ConstrainedRow<S> row = constrained_row<S>(args.problem, r);
    row.y = part_of<S>(args.y, row_span(args.problem.batch, r));
    row.nu_high = args.nu + r;
    row.nu_low = args.nu + args.problem.batch.rows + r;
    if (!row.plain(scratch)) row.general(scratch);
  }
}

}  // namespace
}  // namespace torchlml
