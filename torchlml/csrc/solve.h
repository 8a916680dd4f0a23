// The threshold of one row of finite entries: sum sigma(x + nu) = k with 0 < k < n.
//
// e = exp(x - center) is stored once; with nu = -center + delta and u = exp(delta), every later
// evaluation is sigma = e u / (1 + e u), without an exponential. Two or three evaluations suffice.
#pragma once

#include <math.h>

#include "kernels.h"
#include "memory.h"
#include "vmath.h"

namespace torchlml {
namespace {

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float top = 60;          // exp(x - center) is clamped here: e u cannot overflow
  static constexpr double reach = 16;       // |delta| allowed before the row is centred again
  static constexpr double slope = 1e-12;    // smallest sum of w per entry the clamp cannot disturb
  static constexpr double last_step = 5e-3; // the cubic error below is then under 1e-7
};
template <>
struct Limits<double> {
  static constexpr double top = 600;
  static constexpr double reach = 60;
  static constexpr double slope = 1e-200;
  static constexpr double last_step = 1e-5;
};

// k and what the first guess needs of it; computed once for all rows that share k and n.
struct Target {
  double k = 0, n = 0;
  double logit = 0, probit = 0, tail = 0;

  void set(double k_, int64_t n_) {
    if (k == k_ && n == static_cast<double>(n_)) return;
    k = k_, n = static_cast<double>(n_);
    const double side = k < n - k ? 1 : -1, p = (side > 0 ? k : n - k) / n;
    logit = ::log(k / (n - k));
    tail = side * (0.5 - p);
    // Quantile of the normal distribution, Abramowitz and Stegun 26.2.23.
    const double t = ::sqrt(-2 * ::log(p));
    probit = -side * (t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                              (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))));
  }
};

// Sums over a row at one nu, with t = sigma(-|z|), s = +-1 where z <= 0 / z > 0, and the number of
// z > 0. The residual count - k + sum s t is accurate relative to sum t, even where y rounds to 1.
template <class T>
struct Evaluation {
  double st, t, t2, st2, st3;
  int64_t count;
};

template <class T>
struct Accumulator {
  Vec<T> st{}, t{}, t2{}, st2{}, st3{};
  Mask<T> above{};

  LML_INLINE void add(Vec<T> odds) {
    const Vec<T> r = reciprocal(1 + odds);
    const Vec<T> y = odds * r, small = vmin(y, r);
    const Mask<T> over = greater(odds, T{1});
    const Vec<T> signed_t = negate_where<T>(over, small), q = signed_t * small;
    st += signed_t;
    t += small;
    t2 += small * small;
    st2 += q;
    st3 += q * small;
    above += over;
  }
};

// `odds(i)` gives exp(z) of the i-th whole vector, `odds_tail()` of the rest with zeros beyond it.
// Float lanes are flushed to double every few vectors.
template <class T, class Odds, class Tail>
LML_INLINE Evaluation<T> evaluate(int64_t n, const Odds& odds, const Tail& odds_tail) {
  constexpr int64_t flush = 32;
  const int64_t whole = n / lanes<T>;
  vdouble st{}, t{}, t2{}, st2{}, st3{};
  int64_t count = 0, i = 0;
  bool more = true;
  while (more) {
    Accumulator<T> sum;
    const int64_t end = whole - i > flush ? i + flush : whole;
    for (; i < end; ++i) sum.add(odds(i));
    if (i == whole) {
      if (n % lanes<T>) sum.add(odds_tail());
      more = false;
    }
    st += widen(sum.st), t += widen(sum.t), t2 += widen(sum.t2);
    st2 += widen(sum.st2), st3 += widen(sum.st3);
    count -= total_lanes(sum.above);
  }
  return {total(st), total(t), total(t2), total(st2), total(st3), count};
}

// Where nu would be were the entries normally distributed. Long rows are sampled.
template <class S>
LML_INLINE double guess(const S* x, const Target& target) {
  using T = typename Work<S>::type;
  constexpr int64_t sampled = 2048, run = 4 * lanes<T>, runs = 64;
  const int64_t n = static_cast<int64_t>(target.n);
  const T origin = load_one(x);
  Vec<T> sum{}, squares{};
  double size = target.n;
  const auto add = [&](Vec<T> a) __attribute__((always_inline)) {
    const Vec<T> d = a - origin;
    sum += d;
    squares += d * d;
  };
  if (n <= sampled || n < 2 * run * runs) {
    int64_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) add(load(x + i));
    if (i < n) {
      const Vec<T> d = keep<T>(first_lanes<T>(n - i), load_part(x + i, n - i) - origin);
      sum += d;
      squares += d * d;
    }
  } else {
    size = static_cast<double>(run * runs);
    for (int64_t j = 0; j < runs; ++j) {
      const S* p = x + (n - run) / (runs - 1) * j;
      for (int64_t i = 0; i < run; i += lanes<T>) add(load(p + i));
    }
  }
  const double mean = total(widen(sum)) / size;
  double variance = total(widen(squares)) / size - mean * mean;
  if (variance < 0) variance = 0;
  const double wide = ::sqrt(variance + 2.5464790894703255) * target.probit;  // 8 / pi
  const double narrow = target.logit - variance * target.tail;
  const double weight = 2 / (2 + variance);
  return wide + (narrow - wide) * weight - (static_cast<double>(origin) + mean);
}

template <class T>
struct Fit {
  enum Status { solved, not_finite, declined, careful } status;
  Threshold nu;
  double odds;  // exp(nu.delta); e holds exp(x - nu.center) when solved
  Vec<T> tail;  // the last, partial vector of e
};

// Newton's method from a centre. `e` has room for n entries and may not alias x.
template <class S, class T = typename Work<S>::type>
LML_INLINE Fit<T> fit_from(const S* x, int64_t n, double k, T center, T* e) {
  using L = Limits<T>;
  Fit<T> fit{Fit<T>::declined, {static_cast<double>(center), 0}, 1, Vec<T>{}};
  Vec<T> finite{};
  const auto exponential = [&](Vec<T> a) __attribute__((always_inline)) {
    const Vec<T> z = a - center;
    finite += z;
    return vexp(vmin(splat(L::top), z));
  };
  Evaluation<T> at = evaluate<T>(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        const Vec<T> odds = exponential(load(x + i * lanes<T>));
        store(e + i * lanes<T>, odds);
        return odds;
      },
      [&]() __attribute__((always_inline)) {
        const int64_t rest = n % lanes<T>;
        return fit.tail = keep<T>(first_lanes<T>(rest), exponential(load_part(x + n - rest, rest)));
      });
  const double check = total(widen(finite));
  if (!(check - check == 0)) {
    fit.status = Fit<T>::not_finite;
    return fit;
  }
  double low = -L::reach, high = L::reach;
  for (int iteration = 0; iteration < 16; ++iteration) {
    const double over = static_cast<double>(at.count) - k;
    const double residual = over + at.st, slope = at.t - at.t2;
    if (!(slope >= L::slope * static_cast<double>(n))) return fit;
    const double step = -residual / slope;
    if (step < L::last_step && step > -L::last_step) {
      // |S''| and |S'''| never exceed S', so this second-order step is within 0.7 |step|^3 of the root.
      const double curvature = (at.st - 3 * at.st2 + 2 * at.st3) / slope;
      const double s = step * (1 - 0.5 * curvature * step);
      fit.nu.delta += s;
      fit.odds *= 1 + s * (1 + s * (0.5 + s * (1.0 / 6)));
      fit.status = Fit<T>::solved;
      return fit;
    }
    (residual > 0 ? high : low) = fit.nu.delta;
    // Newton on log A - log B, A - B = residual: exact both for exponential tails and across a gap.
    const double floor = 1e-8 * at.t, signed_slope = at.st - at.st2;
    const double p = 0.5 * (at.t + at.st), q = 0.5 * (at.t - at.st);
    const double a = (p > floor ? p : floor) + (over > 0 ? over : 0);
    const double b = (q > floor ? q : floor) + (over < 0 ? -over : 0);
    const double move = 2 * a * b * ::log(b / a) / ((slope + signed_slope) * b + (slope - signed_slope) * a);
    double delta = fit.nu.delta + move;
    if (!(delta > low && delta < high)) {
      if (low == -L::reach || high == L::reach) return fit;  // beyond what this centre can hold
      delta = 0.5 * (low + high);
    }
    fit.nu.delta = delta;
    fit.odds = ::exp(delta);
    const T u = static_cast<T>(fit.odds);
    at = evaluate<T>(
        n,
        [&](int64_t i) __attribute__((always_inline)) { return load(e + i * lanes<T>) * u; },
        [&]() __attribute__((always_inline)) { return fit.tail * u; });
  }
  return fit;
}

// The whole ladder: a guess, a centre by selection, the careful solver. Uses `e` as scratch.
template <class S, class T = typename Work<S>::type>
LML_INLINE Fit<T> fit_row(const S* x, const Target& target, T* e) {
  const int64_t n = static_cast<int64_t>(target.n);
  const auto copy = [&]() {
    int64_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) store(e + i, load(x + i));
    if (i < n) store_part(e + i, load_part(x + i, n - i), n - i);
  };
  Fit<T> fit = fit_from(x, n, target.k, static_cast<T>(-guess(x, target)), e);
  if (fit.status != Fit<T>::declined) return fit;
  copy();
  fit = fit_from(x, n, target.k, static_cast<T>(threshold_center(e, n, target.k)), e);
  if (fit.status != Fit<T>::declined) return fit;
  copy();
  fit.nu = careful_solve(e, n, target.k);
  fit.status = Fit<T>::careful;
  return fit;
}

}  // namespace
}  // namespace torchlml
