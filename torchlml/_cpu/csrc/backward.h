// The backward pass for one row: dx and dk for the projection, for its logarithm and for the dual variable.
#pragma once

#include "forward.h"

namespace torchlml {
namespace {

// A sum that is computed over short blocks in T and accumulated in double.
template <class T>
struct BlockSum {
  Vec<T> block{};
  vdouble sum{};
  LML_INLINE void flush() {
    sum += widen(block);
    block = Vec<T>{};
  }
  LML_INLINE double value() {
    flush();
    return total(sum);
  }
};
constexpr int64_t block_vectors = 32;

template <class S>
struct BackwardRow : Row<S> {
  using typename Row<S>::T;
  using Row<S>::x, Row<S>::mask, Row<S>::n, Row<S>::team;
  const S* grad;
  const S* y;
  S* dx;
  double* dk;
  T high, low;

  // Returns a piece of the row as a separate row. For a row that is not split, the piece is a copy of the whole row.
  // The address of the copy does not escape, so the compiler can keep nu in registers across stores.
  LML_INLINE BackwardRow part(int64_t begin, int64_t size) const {
    BackwardRow out = *this;
    out.x += begin, out.n = size, out.dx += begin;
    if (mask) out.mask += begin;
    if (grad) out.grad += begin;
    if (y) out.y += begin;
    return out;
  }

  LML_INLINE Vec<T> z_at(int64_t i, int64_t count) const { return (read(x + i, count) + high) + low; }

  // Returns a mask of the lanes that are inside the row, are not masked and have a finite x. All other lanes have zero
  // gradient.
  LML_INLINE Mask<T> usable(int64_t i, int64_t count) const {
    const Vec<T> a = read(x + i, count);
    Mask<T> ok = greater(splat(static_cast<T>(HUGE_VAL)), vabs(a));
    if (mask) ok &= load_mask<T>(mask + i, count);
    if (count < lanes<T>) ok &= first_lanes<T>(count);
    return ok;
  }

  void fill(T value) const {
    each_part(n, team, [=, dx = dx](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; ++i) store_one(dx + i, value);
    });
  }

  void zero() const {
    fill(0);
    *dk = 0;
  }

  // Handles rows with nu = NaN or +-inf. Only +inf entries that share k (0 < y < 1) depend on k.
  void special(Gradient kind) const {
    if (high != high) {
      fill(high);
      *dk = static_cast<double>(high);
      return;
    }
    zero();
    if (high > 0 || kind == Gradient::dual) return;
    double sum = 0;
    int64_t infinite = 0;
    T value = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (!this->available(i) || load_one(x + i) != static_cast<T>(HUGE_VAL)) continue;
      sum += static_cast<double>(load_one(grad + i));
      value = load_one(y + i);
      ++infinite;
    }
    if (!infinite) return;
    const double count = static_cast<double>(infinite);
    if (kind == Gradient::projection && value > 0 && value < 1) *dk = sum / count;
    if (kind == Gradient::logarithm && value < 0 && value > -static_cast<T>(HUGE_VAL)) {
      *dk = sum / (count * ::exp(static_cast<double>(value)));
    }
  }

  struct Sums {
    BlockSum<T> weights, moments;  // sum(w) and sum(w * g)
    // The incoming gradient of an entry with w = 0 (masked, infinite or saturated) is ignored, even if it is NaN.
    LML_INLINE void add(Vec<T> w, Vec<T> g) {
      weights.block += w;
      moments.block += w * keep<T>(greater(w, T{0}), g);
    }
  };

  // Computes w for one block from x and nu. Two short loops overlap better than one loop with both dependency chains.
  // Infinite entries yield w = 0 without a special case. Masked entries may have any value, so their w is set to 0.
  LML_INLINE void block_from_z(T* w, int64_t start, int64_t size, Sums& sums) const {
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      write(w + start + i, vexp(-vabs(z_at(start + i, count))), count);
    });
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> a = read(w + start + i, count), r = reciprocal(1 + a);
      Vec<T> out = a * r * r;
      if (mask) out = keep<T>(load_mask<T>(mask + start + i, count), out);
      write(w + start + i, out, count);
      sums.add(out, read(grad + start + i, count));
    });
  }

  // Computes w = y * (1 - y). If y is near 1, the digits of 1 - y are lost, so w is set to 0 here, and `patch` fills it
  // in. Returns whether the block has such entries.
  LML_INLINE bool block_from_y(T* w, int64_t start, int64_t size, Sums& sums) const {
    Mask<T> found{};
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> p = read(y + start + i, count);
      const Mask<T> near = near_one(p);
      const Vec<T> out = keep<T>(~near, p - p * p);
      write(w + start + i, out, count);
      sums.add(out, read(grad + start + i, count));
      found |= near;
    });
    return any<T>(found);
  }

  // Computes w from x and nu for the entries near 1 that `block_from_y` left out.
  LML_INLINE void patch(T* w, int64_t start, int64_t size, Sums& sums) const {
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Mask<T> near = near_one(read(y + start + i, count));
      if (!any<T>(near)) return;
      const Vec<T> out = keep<T>(near, Logistic<T>(z_at(start + i, count)).weight());
      write(w + start + i, read(w + start + i, count) + out, count);
      sums.add(out, read(grad + start + i, count));
    });
  }

  LML_INLINE int64_t count_near_one(int64_t size) const {
    Mask<T> found{};
    each_vector<T>(
        size, [&](int64_t i, int64_t count) __attribute__((always_inline)) { found += near_one(read(y + i, count)); });
    return -total_lanes(found);
  }

  LML_INLINE static Mask<T> near_one(Vec<T> p) { return greater(p, static_cast<T>(0.995)); }

  LML_INLINE Totals weighted_sums(T* w, bool from_z) const {
    Sums sums;
    each_block<T, block_vectors>(n, [&](int64_t start, int64_t size) __attribute__((always_inline)) {
      if (from_z) {
        block_from_z(w, start, size, sums);
      } else if (block_from_y(w, start, size, sums)) {
        patch(w, start, size, sums);
      }
      sums.weights.flush(), sums.moments.flush();
    });
    return Totals{{sums.weights.value(), sums.moments.value()}, 0};
  }

  // Computes dx = w * (g - dk) and dk = sum(w * g) / sum(w). The first pass stores w in `w`.
  LML_INLINE void projection(T* w) const {
    const int64_t first = n < block_vectors * lanes<T> ? n : block_vectors * lanes<T>;
    // A half-precision y was rounded, so w is never computed from it. For other dtypes, every w is computed from z if
    // many entries of the first block are near 1.
    const bool from_z = sizeof(S) == 2 || count_near_one(first) * 64 > first;
    const Totals totals = sum_of_parts(n, team, [=, *this](int64_t begin, int64_t size) __attribute__((always_inline)) {
      return part(begin, size).weighted_sums(w + begin, from_z);
    });
    const double sum = totals.part[0];
    if (!(sum > 0)) return zero();
    const double mean = totals.part[1] / sum;
    *dk = mean;
    write_projection(w, static_cast<T>(mean));
  }
  LML_INLINE void write_projection(const T* w, T mean) const {
    each_vector<T>(n, team, [=, grad = grad, dx = dx](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> a = read(w + i, count);
      write(dx + i, keep<T>(greater(a, T{0}), a * (read(grad + i, count) - mean)), count);
    });
  }

  // Computes dx for a row that the bound on the sum does not constrain. In such a row, y = sigmoid(x).
  LML_INLINE void free_row() const {
    *dk = 0;
    each_vector<T>(n, team, [*this](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> w = Logistic<T>(read(x + i, count)).weight();
      write(dx + i, keep<T>(usable(i, count) & greater(w, T{0}), w * read(grad + i, count)), count);
    });
  }

  // Returns min |z|. Multiplying all w by exp(min |z|) keeps p = w / sum(w) accurate even if every w underflows.
  LML_INLINE T nearest() const {
    if (n <= long_row) return nearest_part();
    Scratch<T> scratch;
    T* pieces = scratch.room((n + piece_size - 1) / piece_size);
    each_piece(n, team,
               [=, *this](int64_t i, int64_t begin, int64_t size) { pieces[i] = part(begin, size).nearest_part(); });
    T least = pieces[0];
    for (int64_t i = 1; i * piece_size < n; ++i) least = pieces[i] < least ? pieces[i] : least;
    return least;
  }
  LML_INLINE T nearest_part() const {
    Vec<T> least = splat(static_cast<T>(HUGE_VAL));
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> z = select<T>(usable(i, count), vabs(z_at(i, count)), least);
      least = vmin(z, least);
    });
    T out = least[0];
    for (int j = 1; j < lanes<T>; ++j) out = least[j] < out ? least[j] : out;
    return out;
  }
  struct Scaled {
    Vec<T> weight, sigma_minus;
  };
  LML_INLINE Scaled scaled(int64_t i, int64_t count, T least, T factor) const {
    const Vec<T> z = z_at(i, count);
    const Vec<T> b = vexp(least - vabs(z)), a = b * factor, r = reciprocal(1 + a);
    const Mask<T> ok = usable(i, count);
    return {keep<T>(ok, b * r * r), keep<T>(ok, select<T>(greater(z, T{0}), a * r, 1 - a * r))};
  }

  LML_INLINE Vec<T> usable_gradient(int64_t i, int64_t count) const {
    return keep<T>(usable(i, count), read(grad + i, count));
  }
  LML_INLINE Totals scaled_sums(T least, T factor) const {
    BlockSum<T> weights, moments;
    each_vector_in_blocks<T, block_vectors>(
        n,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          const Scaled at = scaled(i, count, least, factor);
          weights.block += at.weight;
          moments.block += at.sigma_minus * usable_gradient(i, count);
        },
        [&]() __attribute__((always_inline)) { weights.flush(), moments.flush(); });
    return Totals{{weights.value(), moments.value()}, 0};
  }

  // Computes dx = a - p * sum(a) and dk = sum(a) / sum(w), where a = g * sigmoid(-z) and p = w / sum(w).
  LML_INLINE void logarithm() const {
    const T least = nearest(), factor = static_cast<T>(::exp(-static_cast<double>(least)));
    const Totals totals = sum_of_parts(n, team, [=, *this](int64_t begin, int64_t size) __attribute__((always_inline)) {
      return part(begin, size).scaled_sums(least, factor);
    });
    const double sum = totals.part[0], moment = totals.part[1];
    if (!(sum > 0)) return zero();
    *dk = moment == 0 ? 0 : moment / (sum * ::exp(-static_cast<double>(least)));
    const T share = static_cast<T>(moment / sum);
    each_vector<T>(n, team, [=, *this](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Scaled at = scaled(i, count, least, factor);
      write(dx + i, at.sigma_minus * usable_gradient(i, count) - at.weight * share, count);
    });
  }

  // Computes w * exp(least) for every entry, with one exponential per entry, and returns the sum.
  LML_INLINE double weigh(T* w, T least) const {
    const T factor = static_cast<T>(::exp(-static_cast<double>(least)));
    if (n <= long_row) return weigh_part(w, least, factor);
    const auto piece = [=, *this](int64_t begin, int64_t size) {
      return Totals{{part(begin, size).weigh_part(w + begin, least, factor)}, 0};
    };
    return sum_of_pieces(n, team, piece).part[0];
  }
  LML_INLINE double weigh_part(T* w, T least, T factor) const {
    BlockSum<T> weights;
    each_block<T, block_vectors>(n, [&](int64_t start, int64_t size) __attribute__((always_inline)) {
      each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        write(w + start + i, vexp(least - vabs(z_at(start + i, count))), count);
      });
      each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec<T> b = read(w + start + i, count), r = reciprocal(1 + b * factor);
        Vec<T> out = b * r * r;
        // Infinite entries yield 0 without a special case. Masked entries may have any value, so their w is set to 0.
        if (mask) out = keep<T>(load_mask<T>(mask + start + i, count), out);
        write(w + start + i, out, count);
        weights.block += out;
      });
      weights.flush();
    });
    return weights.value();
  }

  // Computes dx = -g * p and dk = g / sum(w), the derivatives of nu multiplied by g, where p = w / sum(w). Unless `w`
  // is dx, the scaled weights remain in `w`. Returns g divided by their sum.
  LML_INLINE T dual(double g, T* w) const { return n > long_row ? long_dual(g, w) : part(0, n).any_dual(g, w); }
  __attribute__((noinline)) T long_dual(double g, T* w) const { return any_dual(g, w); }
  LML_INLINE T any_dual(double g, T* w) const {
    T least = 0;
    double sum = weigh(w, least);
    // If the sum is this small, compute w again, scaled so that its largest value does not underflow.
    if (!(sum > (sizeof(T) == 8 ? 1e-250 : 1e-20))) sum = weigh(w, least = nearest());
    if (!(sum > 0)) return zero(), T{0};
    *dk = g == 0 ? 0 : g / (sum * ::exp(-static_cast<double>(least)));
    const T share = static_cast<T>(g / sum);
    each_vector<T>(n, team, [=, dx = dx](int64_t i, int64_t count) __attribute__((always_inline)) {
      write(dx + i, -(read(w + i, count) * share), count);
    });
    return share;
  }
};

}  // namespace
}  // namespace torchlml
