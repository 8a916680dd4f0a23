// Finds nu for one row of finite entries, such that sum(sigmoid(x + nu)) = k with 0 < k < n.
//
// The solver stores one exponential e per entry. Every later evaluation computes y = e * u / (1 + e * u). With a good
// initial guess and Halley's method in log space, two or three evaluations suffice.
#pragma once

#include <math.h>

#include "sums.h"

namespace torchlml {
namespace {

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float top = 60;           // largest z; larger values are clamped, so that exp(z) is finite
  static constexpr double reach = 16;        // largest |delta| before the row must be centered again
  static constexpr double slope = 1e-12;     // smallest sum(w) / n at which clamping z has no effect
  static constexpr double last_step = 5e-3;  // longest last step, whose cubic error is below 1e-7
  static constexpr double gap = 0.02;        // if sum(w) / sum(y) is smaller, sum(y) is treated as a staircase in nu
};
template <>
struct Limits<double> {
  static constexpr double top = 400;
  static constexpr double reach = 60;
  static constexpr double slope = 1e-130;
  static constexpr double last_step = 1e-5;
  static constexpr double gap = 0.02;
};

// k and the constants for the initial guess, which are computed once for all rows with the same k and n.
struct Target {
  double k = 0;
  int64_t n = 0;
  bool flip = false;   // k > n / 2: solve LML_(n-k)(-x) = 1 - LML_k(x), whose sums are small
  double small = 0;    // the smaller of k and n - k
  double inverse = 0;  // 1 / n
  double logit = 0, probit = 0, tail = 0;

  void set(double k_, int64_t n_) {
    if (k == k_ && n == n_) return;
    k = k_, n = n_;
    const double all = static_cast<double>(n), p = (k < all - k ? k : all - k) / all;
    flip = k > all - k;
    inverse = 1 / all;
    small = flip ? all - k : k;
    logit = ::log(k / (all - k));
    tail = flip ? p - 0.5 : 0.5 - p;
    // Quantile of the normal distribution, from Abramowitz and Stegun 26.2.23.
    const double t = ::sqrt(-2 * ::log(p));
    const double q =
        t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
    probit = flip ? q : -q;
  }
};

struct Moments {
  double mean, variance;
};

// Computes the mean and the variance of a row. In a long row, they come from a sample of its entries.
template <class S>
LML_INLINE Moments moments(const S* x, const Target& target) {
  using T = typename Work<S>::type;
  constexpr int64_t run = 4 * lanes<T>;
  const int64_t n = target.n, runs = n > 16384 ? 1024 / lanes<T> : 64 / lanes<T>;
  const T origin = load_one(x);
  Vec<T> sum{}, squares{};
  const auto add = [&](Vec<T> d) __attribute__((always_inline)) {
    sum += d;
    squares += d * d;
  };
  double inverse = target.inverse;
  if (n < 2 * run * runs) {
    int64_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) add(load(x + i) - origin);
    if (i < n) add(keep<T>(first_lanes<T>(n - i), load_part(x + i, n - i) - origin));
  } else {
    const int64_t stride = (n - run) / (runs - 1);
    inverse = 1.0 / static_cast<double>(run * runs);
    for (int64_t j = 0; j < runs; ++j) {
      for (int64_t i = 0; i < run; i += lanes<T>) add(load(x + j * stride + i) - origin);
    }
  }
  const double mean = total(widen(sum)) * inverse;
  const double variance = total(widen(squares)) * inverse - mean * mean;
  return {static_cast<double>(origin) + mean, variance < 0 ? 0 : variance};
}

// Returns the approximate nu for normally distributed entries with the mean and variance of the row.
template <class S>
LML_INLINE double guess(const S* x, const Target& target) {
  const Moments row = moments(x, target);
  const double wide = ::sqrt(row.variance + 2.5464790894703255) * target.probit;  // 8 / pi
  const double narrow = target.logit - row.variance * target.tail;
  return wide + (narrow - wide) * (2 / (2 + row.variance)) - row.mean;
}

template <class T>
struct Fit {
  enum Status { solved, not_finite, declined, careful } status;
  bool clamped;  // the target is flipped, and an exponential was clamped, so a tiny y cannot be computed from it
  Threshold nu;
  double odds;  // if solved, exp(z) = e * odds, or exp(-z) = e * odds for a flipped target
  Vec<T> tail;  // the last, partial vector of e
};

// Searches for the nu of one row, starting from nu = -center. Stores e = exp(+-(x - center)) once (scaled, see vmath.h)
// and searches for delta in +-(x + nu) = log e + delta, where the minus signs are for a flipped target. Takes Halley
// steps on log(sum(y)) - log(k), or Newton steps (`search_gap`) if sum(y) is nearly a staircase in nu. Call `begin`,
// then `advance` and `look` in turn as long as `advance` returns true. The separate calls allow the searches of several
// rows to be interleaved.
template <class T>
class Newton {
  using L = Limits<T>;
  static constexpr T unscale = 1 / Stored::scale(T{});

 public:
  // Stores the exponentials in `e`, which must have space for n entries and must not alias x.
  template <class S>
  LML_INLINE void begin(const S* x, const Target& target, T center, T* e, Team team) {
    n_ = target.n, k_ = target.small, flip_ = target.flip, e_ = e, team_ = team;
    iteration_ = 0, delta_ = 0, low_ = -L::reach, high_ = L::reach;
    fit_ = {Fit<T>::declined, false, {static_cast<double>(center), 0}, unscale, Vec<T>{}};
    if (flip_) {
      start<true>(x, [=](Vec<T> a) __attribute__((always_inline)) { return center - a; });
    } else {
      start<false>(x, [=](Vec<T> a) __attribute__((always_inline)) { return a - center; });
    }
  }

  // Takes a step based on the current sums. Returns false if the search has ended, with or without a solution.
  __attribute__((noinline)) bool advance() {
    const double y = k_ + residual_;
    if (!(w_ >= L::slope * static_cast<double>(n_))) return false;
    if (iteration_ == 8 || w_ < L::gap * y) {
      search_gap();
      return false;
    }
    if (close_enough(-residual_ / w_)) {
      if (iteration_ == 0) return true;  // the first sums are inaccurate
      finish(-residual_ / w_, bend_ / w_);
      return false;
    }
    (residual_ > 0 ? high_ : low_) = delta_;
    // A Halley step on log(sum(y)) - log(k), which is nearly linear in delta unless entries saturate.
    const double step = -log_ratio(y, k_) * (y / w_), denominator = 1 + 0.5 * step * (bend_ / w_ - w_ / y);
    return move(step / (denominator < 0.5 ? 0.5 : denominator > 2 ? 2 : denominator));
  }

  // Computes the sums after the last step. Not inlined, because compilers generate a better loop this way.
  __attribute__((noinline)) void look() {
    const Totals sums = evaluate_stored<SignedSums>();
    residual_ = (static_cast<double>(sums.above) - k_) + sums.part[0];
    w_ = sums.part[1], bend_ = sums.part[2];
    ++iteration_;
  }

  // Runs the search to its end.
  LML_INLINE void search() {
    while (advance()) look();
  }

  Fit<T> fit() const {
    Fit<T> fit = fit_;
    fit.nu.delta = flip_ ? -delta_ : delta_;
    return fit;
  }

 private:
  template <bool watch_top, class S, class F>
  LML_INLINE void start(const S* x, const F& centred) {
    T* e = e_;
    Vec<T>* tail = &fit_.tail;
    const Totals sums = sum_of_parts(n_, team_, [=](int64_t begin, int64_t size) __attribute__((always_inline)) {
      return exponentials<watch_top>(x + begin, e + begin, size, centred, tail);
    });
    fit_.clamped = sums.above != 0;
    residual_ = sums.part[0] - k_, w_ = sums.part[1], bend_ = sums.part[2];
    if (!(sums.part[3] - sums.part[3] == 0)) {
      fit_.status = Fit<T>::not_finite;
      w_ = 0;  // makes `advance` return false
    }
  }

  // Stores e for the entries x and returns their sums. part[3] is not finite if an entry is not finite, and `above` is
  // nonzero if an entry was clamped. Only the last piece of a row has a tail.
  template <bool watch_top, class S, class F>
  static LML_INLINE Totals exponentials(const S* x, T* e, int64_t n, F centred, Vec<T>* last) {
    Vec<T> finite{}, tail{};
    Mask<T> clamped{};
    const auto exponential = [&](Vec<T> a) __attribute__((always_inline)) {
      const Vec<T> z = centred(a);
      finite += z;
      if constexpr (watch_top) clamped |= greater(z, L::top);
      return vexp<Stored>(vmin(splat(L::top), z));
    };
    Totals sums = evaluate<T, Sums>(
        n,
        [&](int64_t i) __attribute__((always_inline)) { store(e + i * lanes<T>, exponential(load(x + i * lanes<T>))); },
        [&](int64_t i) __attribute__((always_inline)) { return load(e + i * lanes<T>) * unscale; },
        [&]() __attribute__((always_inline)) {
          const int64_t rest = n % lanes<T>;
          tail = keep<T>(first_lanes<T>(rest), exponential(load_part(x + n - rest, rest)));
          return tail * unscale;
        });
    if (n % lanes<T>) *last = tail;
    sums.part[3] = total(widen(finite));
    sums.above = any<T>(clamped);
    return sums;
  }

  __attribute__((noinline)) void search_gap() {
    for (int iteration = 0; iteration < 16; ++iteration) {
      const Totals sums = evaluate_stored<TwoSidedSums>();
      const double st = sums.part[0], w = sums.part[1], t = sums.part[3], sw = sums.part[4];
      const double over = static_cast<double>(sums.above) - k_, residual = over + st;
      if (!(w >= L::slope * static_cast<double>(n_))) return;
      if (close_enough(-residual / w)) return finish(-residual / w, sums.part[2] / w);
      (residual > 0 ? high_ : low_) = delta_;
      // A Newton step on log A - log B, where A - B = residual. It is exact for exponential tails and across a wide
      // gap.
      const double least = 1e-8 * t, p = 0.5 * (t + st), q = 0.5 * (t - st);
      const double a = (p > least ? p : least) + (over > 0 ? over : 0);
      const double b = (q > least ? q : least) + (over < 0 ? -over : 0);
      if (!move(2 * a * b * ::log(b / a) / ((w + sw) * b + (w - sw) * a))) return;
    }
  }

  template <template <class> class Kind>
  LML_INLINE Totals evaluate_stored() const {
    const T u = static_cast<T>(fit_.odds);
    const T* stored = e_;
    const Vec<T> tail = fit_.tail;
    return sum_of_parts(n_, team_, [=](int64_t begin, int64_t size) __attribute__((always_inline)) {
      const T* e = stored + begin;
      return evaluate<T, Kind>(
          size, [](int64_t) {}, [=](int64_t i) __attribute__((always_inline)) { return load(e + i * lanes<T>) * u; },
          [=]() __attribute__((always_inline)) { return tail * u; });
    });
  }

  static bool close_enough(double step) { return step < L::last_step && step > -L::last_step; }

  // The second and third derivatives of sum(y) never exceed the first. This second-order step therefore ends within
  // 0.7 * |step|^3 of the root. This error bound is the certificate.
  void finish(double step, double curvature) {
    const double s = step * (1 - 0.5 * curvature * step);
    delta_ += s;
    fit_.odds *= 1 + s * (1 + s * (0.5 + s * (1.0 / 6)));
    fit_.status = Fit<T>::solved;
  }

  // Returns false if the root is out of reach of this center.
  bool move(double step) {
    double next = delta_ + step;
    if (!(next > low_ && next < high_)) {
      if (low_ == -L::reach || high_ == L::reach) return false;
      next = 0.5 * (low_ + high_);
    }
    delta_ = next;
    fit_.odds = exponential_of(next) * unscale;
    return true;
  }

  // Computes exp with the accuracy that T needs. A library call would account for a tenth of the time spent on a short
  // row.
  static double exponential_of(double a) {
    if constexpr (sizeof(T) == 8) return ::exp(a);
    const double shifted = a * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    const double r = a - n * 0.6931471805599453, r2 = r * r;
    const double p45 = 1.0 / 24 + r * (1.0 / 120), p67 = 1.0 / 720 + r * (1.0 / 5040);
    const double p = (1 + r) + r2 * ((0.5 + r * (1.0 / 6)) + r2 * (p45 + r2 * p67));
    return cast_bits<double>(cast_bits<int64_t>(p) + static_cast<int64_t>(cast_bits<uint64_t>(shifted) << 52));
  }

  // Computes log(a / b) to a few digits, which is enough for a step.
  static double log_ratio(double a, double b) {
    const double s = (a - b) / (a + b), q = s * s;
    if (q > 0.2) return ::log(a / b);
    return 2 * s * (1 + q * (1.0 / 3 + q * (0.2 + q * (1.0 / 7 + q * (1.0 / 9)))));
  }

  int64_t n_;
  double k_;
  bool flip_;
  T* e_;
  Team team_;
  Fit<T> fit_;
  int iteration_;
  double delta_, low_, high_;
  double residual_, w_, bend_;  // the sums at delta
};

// Solves a row of finite entries by a search around a center found by selection or, if that fails, by the slow solver
// in careful.cpp. `e` also serves as space for a copy of the row.
template <class S, class T = typename Work<S>::type>
__attribute__((noinline)) Fit<T> fit_hard_row(const S* x, const Target& target, T* e, Team team) {
  const auto copy = [&]() {
    each_vector<T>(target.n, [&](int64_t i, int64_t count) { write(e + i, read(x + i, count), count); });
  };
  copy();
  Newton<T> newton;
  newton.begin(x, target, static_cast<T>(threshold_center(e, target.n, target.k)), e, team);
  newton.search();
  Fit<T> fit = newton.fit();
  if (fit.status == Fit<T>::solved) return fit;
  copy();
  fit.nu = careful_solve(e, target.n, target.k);
  fit.status = Fit<T>::careful;
  return fit;
}

// Computes nu for one row. The status is `not_finite` if a sum is not finite because the row has infinite, NaN or huge
// (near 1e38) entries.
template <class S, class T = typename Work<S>::type>
Fit<T> fit_row(const S* x, const Target& target, T* e, Team team) {
  Newton<T> newton;
  newton.begin(x, target, static_cast<T>(-guess(x, target)), e, team);
  newton.search();
  const Fit<T> fit = newton.fit();
  return fit.status != Fit<T>::declined ? fit : fit_hard_row(x, target, e, team);
}

}  // namespace
}  // namespace torchlml
