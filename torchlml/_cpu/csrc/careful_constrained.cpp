// A slow but simple double-precision solver for rows of a constrained projection that the fast solver cannot certify.
// It sorts the events, which are the values of nu at which an entry reaches a bound. It then finds the two events
// around the root by binary search, and applies a closed-form solution between them. The number of steps is bounded.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels.h"

namespace torchlml {

namespace {

template <class T>
class Row {
 public:
  Row(const T* x, const T* upper, int64_t stride, int64_t n, double k, bool sparsemax)
      : x_(x), upper_(upper), stride_(stride), n_(n), k_(k), sparsemax_(sparsemax) {}

  Threshold solve() const {
    const std::vector<Threshold> events = sorted_events();
    if (events.empty()) return {0, 0};
    // Find the last event at which the sum is at most k.
    size_t first = 0, count = events.size();
    while (count > 0) {
      const size_t half = count / 2;
      if (sum_at(events[first + half]).excess <= 0) {
        first += half + 1, count -= half + 1;
      } else {
        count = half;
      }
    }
    Threshold nu = first > 0 ? events[first - 1] : lowest();
    // Compute the closed-form solution for the entries that are free at nu, which means between their bounds. Repeat
    // this if rounding led to the wrong set of free entries.
    int64_t free = -1, over = -1;
    for (int step = 0; step < 8; ++step) {
      const Sums at = sum_at(nu);
      if (at.free == 0 || (at.free == free && at.over == over)) break;
      free = at.free, over = at.over;
      const Threshold root = root_of(nu, at);
      if (!std::isfinite(root.delta)) break;
      nu = root;
    }
    return nu;
  }

 private:
  struct Sums {
    double excess, rest;  // sum - k, and k minus the sum of the entries at their bounds
    int64_t free, over;
    double largest;  // the largest free entry
  };

  double bound(int64_t i) const { return static_cast<double>(upper_[i * stride_]); }
  double z(int64_t i, const Threshold& nu) const { return (static_cast<double>(x_[i]) - nu.center) + nu.delta; }

  // Whether nu is at or above the value at which the entry reaches its bound.
  bool is_over(double z, double bound) const { return z >= (sparsemax_ ? bound : std::log(bound)); }
  bool is_free(double z, double bound) const { return !is_over(z, bound) && (!sparsemax_ || z >= 0); }

  // Returns a lower bound on the root, at which no entry exceeds k / n.
  Threshold lowest() const {
    const T largest = *std::max_element(x_, x_ + n_);
    const double part = k_ / static_cast<double>(n_);
    return {static_cast<double>(largest), sparsemax_ ? part : std::log(part)};
  }

  std::vector<Threshold> sorted_events() const {
    std::vector<Threshold> events;
    events.reserve(static_cast<size_t>(sparsemax_ ? 2 * n_ : n_));
    for (int64_t i = 0; i < n_; ++i) {
      const double x = static_cast<double>(x_[i]), u = bound(i);
      if (!(u > 0)) continue;
      if (sparsemax_) events.push_back({x, 0});
      events.push_back({x, sparsemax_ ? u : std::log(u)});
    }
    // Adding a bound of 1 to an entry of 1e38 has no effect after rounding. Break the resulting ties by the entries,
    // then by the bounds.
    std::sort(events.begin(), events.end(), [](const Threshold& a, const Threshold& b) {
      const double first = a.delta - a.center, second = b.delta - b.center;
      if (first != second) return first < second;
      return a.center != b.center ? a.center > b.center : a.delta < b.delta;
    });
    return events;
  }

  Sums sum_at(const Threshold& nu) const {
    double taken = -k_, carry = 0, sum = 0;
    Sums sums{0, 0, 0, 0, -HUGE_VAL};
    for (int64_t i = 0; i < n_; ++i) {
      const double at = z(i, nu), u = bound(i);
      if (is_over(at, u)) {
        // Use compensated summation, because k minus the bounds may be tiny compared with k.
        const double a = u - carry, next = taken + a;
        carry = (next - taken) - a;
        taken = next;
        ++sums.over;
      } else if (is_free(at, u)) {
        sum += sparsemax_ ? at : std::min(std::exp(at), u);
        sums.largest = std::max(sums.largest, static_cast<double>(x_[i]));
        ++sums.free;
      }
    }
    sums.excess = taken + sum;
    sums.rest = -taken;
    return sums;
  }

  // Returns the root for the set of entries that are free at `nu`, relative to the largest of them.
  Threshold root_of(const Threshold& nu, const Sums& at) const {
    double sum = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (!is_free(z(i, nu), bound(i))) continue;
      const double distance = static_cast<double>(x_[i]) - at.largest;
      sum += sparsemax_ ? distance : std::exp(distance);
    }
    if (sparsemax_) return {at.largest, (at.rest - sum) / static_cast<double>(at.free)};
    return {at.largest, std::log(at.rest) - std::log(sum)};
  }

  const T* x_;
  const T* upper_;
  int64_t stride_, n_;
  double k_;
  bool sparsemax_;
};

}  // namespace

template <class T>
Threshold careful_constrained(const T* x, const T* upper, int64_t stride, int64_t n, double k, bool sparsemax) {
  return Row<T>(x, upper, stride, n, k, sparsemax).solve();
}

template Threshold careful_constrained(const float*, const float*, int64_t, int64_t, double, bool);
template Threshold careful_constrained(const double*, const double*, int64_t, int64_t, double, bool);

}  // namespace torchlml
