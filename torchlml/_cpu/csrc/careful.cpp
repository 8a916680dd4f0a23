// A slow but simple double-precision solver for rows that the fast solver cannot certify. Examples are rows with gaps
// of hundreds, or even 1e38, between logits, and rows with a k within 1e-9 of an integer. This file instantiates
// standard library templates. The linker could merge copies of them for different instruction sets, so the file is
// compiled only for the baseline instruction set.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace torchlml {

namespace {

// The floor(k)-th largest entry, `above`, and the next largest entry, `below`. For a fractional k, the threshold is
// near `below`. For an integer k, it is between the two.
template <class T>
struct Cut {
  double above, below;  // above is +inf if k < 1

  Cut(T* x, int64_t n, double k) {
    const int64_t whole = std::min<int64_t>(static_cast<int64_t>(std::floor(k)), n - 1);
    std::nth_element(x, x + whole, x + n, [](T a, T b) { return a > b; });
    below = static_cast<double>(x[whole]);
    above = whole > 0 ? static_cast<double>(*std::min_element(x, x + whole)) : std::numeric_limits<double>::infinity();
  }
};

double cut_center(double above, double below, double k) {
  return k == std::floor(k) ? 0.5 * above + 0.5 * below : below;
}

}  // namespace

template <class T>
double threshold_center(T* x, int64_t n, double k) {
  const Cut<T> cut(x, n, k);
  return cut_center(cut.above, cut.below, k);
}

template <class T>
Threshold careful_solve(T* x, int64_t n, double k) {
  const Cut<T> cut(x, n, k);
  const double center = cut_center(cut.above, cut.below, k);
  // Bracket the root. If nu is far below -above, fewer than floor(k) entries have a y near 1, and the sum is less than
  // k. If nu is far above -below, at least floor(k) + 1 entries have a y near 1, and the sum is greater than k. The
  // margin covers log n and any fractional part of k that a double can represent.
  const double margin = 800;
  const double above = std::isfinite(cut.above) ? cut.above : cut.below;
  const double farthest = std::numeric_limits<double>::max() / 4;
  double low = std::max(center - above - margin, -farthest);
  double high = std::min(center - cut.below + margin, farthest);
  double delta = 0;
  for (int iteration = 0; iteration < 400; ++iteration) {
    double p = 0, q = 0, dp = 0, dq = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double z = (static_cast<double>(x[i]) - center) + delta;
      const double a = std::exp(-std::fabs(z)), t = a / (1 + a), w = t / (1 + a);
      if (z > 0) {
        ++count, q += t, dq += w;
      } else {
        p += t, dp += w;
      }
    }
    const double over = static_cast<double>(count) - k, residual = over + (p - q), slope = dp + dq;
    if (residual == 0 || std::fabs(residual) <= 2e-16 * slope) break;
    (residual > 0 ? high : low) = delta;
    const double a = p + std::max(over, 0.0), b = q + std::max(-over, 0.0);
    double next = delta + (std::log(b) - std::log(a)) / (dp / a + dq / b);
    if (!(next > low && next < high)) next = 0.5 * (low + high);
    // The search has also converged if the bracket or the step is as small as the rounding error.
    const bool settled =
        std::fabs(next - delta) <= 1e-15 * std::max(1.0, std::fabs(delta)) || next == low || next == high;
    delta = next;
    if (settled) break;
  }
  return {center, delta};
}

template <class T>
T kth_largest(T* x, int64_t n, int64_t k) {
  std::nth_element(x, x + (k - 1), x + n, [](T a, T b) { return a > b; });
  return x[k - 1];
}

template double threshold_center(float*, int64_t, double);
template double threshold_center(double*, int64_t, double);
template Threshold careful_solve(float*, int64_t, double);
template Threshold careful_solve(double*, int64_t, double);
template float kth_largest(float*, int64_t, int64_t);
template double kth_largest(double*, int64_t, int64_t);

}  // namespace torchlml
