// Solves short rows, one row per vector lane. A block of rows is transposed when it is read and when it is written, so
// that moments, exponentials, sums and steps are vertical operations. There are no sums over lanes, and one vector
// division serves the whole block. The method is the same as in solve.h, but without `search_gap`. A row's result does
// not depend on its neighbors, because each lane stops when its own certificate holds and does not change afterwards.
#pragma once

#include "solve.h"

namespace torchlml {
namespace {

constexpr int64_t short_row = 256;  // the longest row for which a block fits into the L1 cache
constexpr int block_rows = lanes<float>;
constexpr int64_t columns_per_sum = 16;  // number of entries that are summed before a compensated addition

// Computes log a to about 7 digits, for normal a > 0.
LML_INLINE vfloat vlog(vfloat a) {
  const ifloat exponent = (cast_bits<ifloat>(a) - 0x3f3504f3) >> 23;  // puts the mantissa in [sqrt(1/2), sqrt(2))
  const vfloat mantissa = cast_bits<vfloat>(cast_bits<ifloat>(a) - (exponent << 23));
  const vfloat s = (mantissa - 1.0f) / (mantissa + 1.0f), q = s * s;
  return __builtin_convertvector(exponent, vfloat) * 0.69314718f +
         s * (2.0f + q * (0.66666667f + q * (0.4f + q * 0.28571429f)));
}

// Computes log(a / b) = log(1 + (a - b) / b), given a - b. It is accurate to full relative precision if the difference
// is small.
LML_INLINE vfloat log_ratio(vfloat a, vfloat b, vfloat difference) {
  const vfloat s = difference / (a + b), q = s * s;
  const vfloat near = s * (2.0f + q * (2.0f / 3 + q * (2.0f / 5 + q * (2.0f / 7 + q * (2.0f / 9)))));
  const ifloat far = greater(q, 0.2f);
  return any<float>(far) ? select<float>(far, vlog(a / b), near) : near;
}

LML_INLINE vfloat vsqrt(vfloat a) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (vfloat)_mm256_sqrt_ps((__m256)a);
#elif defined(__SSE2__)
  return (vfloat)_mm_sqrt_ps((__m128)a);
#else
  for (int i = 0; i < block_rows; ++i) a[i] = ::sqrtf(a[i]);
  return a;
#endif
}

LML_INLINE vfloat clamp(vfloat a, float low, float high) { return vmin(splat(high), -vmin(splat(-low), -a)); }

LML_INLINE ifloat is_finite(vfloat a) { return greater(splat(static_cast<float>(HUGE_VAL)), vabs(a)); }

// a + b as the rounded sum and its exact rounding error.
struct ExactSum {
  vfloat sum, error;
  LML_INLINE ExactSum(vfloat a, vfloat b) : sum(a + b) {
    const vfloat c = sum - a;
    error = (a - (sum - c)) + (b - c);
  }
};

// A sum over many columns: `part` sums a few columns in plain float, and `flush` adds it to the total with
// compensation.
struct ColumnSum {
  vfloat part{}, sum{}, error{};
  LML_INLINE void flush() {
    const ExactSum next(sum, part);
    sum = next.sum, error += next.error, part = vfloat{};
  }
};

class LaneSolver {
  using L = Limits<float>;
  static constexpr float unscale = 1 / Stored::scale(0.0f);
  static constexpr float infinity = static_cast<float>(HUGE_VAL);

 public:
  // The rows of a block: pointers to their entries, masks (null = all entries are available), sizes and targets. All
  // `block_rows` lanes must be set. Unused lanes may repeat a row.
  template <class S>
  struct Input {
    const S* x[block_rows];
    const bool* mask[block_rows];
    int64_t size[block_rows];
    float k_high[block_rows], k_low[block_rows];  // k as an unevaluated sum
    // Two arrays of the same size as the block that will be read or written soon: the next block and the output. They
    // are fetched into the cache while the block is solved, because the hardware prefetcher cannot follow that many
    // rows at once.
    const void* soon[2];
  };

  // Reads a block.
  template <class S>
  void read(const Input<S>& in) {
    same_size_ = true;
    size_ = in.size[0];
    for (int i = 1; i < block_rows; ++i) {
      same_size_ &= in.size[i] == in.size[0];
      size_ = in.size[i] > size_ ? in.size[i] : size_;
    }
    gaps_ = !same_size_ || in.mask[0];
    gaps_ ? read_with_gaps(in) : read_whole(in);
    row_k_ = load(in.k_high), row_k_low_ = load(in.k_low);
    for (int i = 0; i < 2; ++i) soon_[i] = static_cast<const char*>(in.soon[i]);
    column_bytes_ = block_rows * sizeof(S);
  }

  // Solves the blocks that were read. Lanes for which `solved` is false need another solver. Each phase runs for all
  // blocks before the next phase begins, so that the processor can overlap the long dependency chains of their steps.
  // The function is the same for all dtypes and is not inlined, so that it is compiled only once.
  static __attribute__((noinline)) void solve(LaneSolver* solvers, int count) {
    const auto each = [=](const auto& f) __attribute__((always_inline)) {
      for (int i = 0; i < count; ++i) f(solvers[i]);
    };
    each([](LaneSolver& block) __attribute__((always_inline)) { block.guess(); });
    each([](LaneSolver& block) __attribute__((always_inline)) { block.begin(); });
    each([](LaneSolver& block) __attribute__((always_inline)) { block.step<true>(); });
    for (int iteration = 0; iteration < 8; ++iteration) {
      bool going = false;
      each([&](LaneSolver& block) __attribute__((always_inline)) {
        if (any<float>(block.active_)) going = true, block.look();
      });
      if (!going) break;
      each([](LaneSolver& block) __attribute__((always_inline)) {
        if (any<float>(block.active_)) block.step<false>();
      });
    }
  }

  ifloat solved() const { return solved_; }
  // Rows whose y cannot be computed from the exponentials, because the target is flipped and the exponential of an
  // entry with a tiny y was clamped.
  ifloat clamped() const { return clamped_; }
  void nu(float* high, float* low) const {
    const ExactSum delta(delta_, last_step_);
    const ExactSum nu(negate_where<float>(flip_, delta.sum), -center_);
    const ExactSum rounded(nu.sum, nu.error + negate_where<float>(flip_, delta.error));
    store(high, rounded.sum);
    store(low, rounded.error);
  }

  // Writes y for all lanes. y[i] must have space for the entries of row i.
  template <class S>
  void write(S* const (&y)[block_rows], const int64_t (&size)[block_rows]) const {
    if (!any<float>(flip_)) return write_projection<false, false>(y, size);  // entries in gaps have e = 0, so y = 0
    gaps_ ? write_projection<true, true>(y, size) : write_projection<false, true>(y, size);
  }

 private:
  // ------------------------------------------------------------------ reading

  template <class S>
  LML_INLINE void read_whole(const Input<S>& in) {
    vfloat a[block_rows];
    if (size_ < block_rows) {
      for (int i = 0; i < block_rows; ++i) a[i] = load_part(in.x[i], size_);
      put_columns(0, a);
      return;
    }
    for (int64_t c = 0; c < size_; c += block_rows) {
      const int64_t at = c + block_rows <= size_ ? c : size_ - block_rows;  // the last two square blocks may overlap
      for (int i = 0; i < block_rows; ++i) a[i] = load(in.x[i] + at);
      put_columns(at, a);
    }
  }

  // Replaces masked entries and entries past the end of a row with -inf.
  template <class S>
  LML_INLINE void read_with_gaps(const Input<S>& in) {
    const vfloat absent = splat(-infinity);
    vfloat a[block_rows];
    int64_t c = 0;
    for (; in.mask[0] && same_size_ && c + block_rows <= size_; c += block_rows) {
      for (int i = 0; i < block_rows; ++i) {
        a[i] = select<float>(load_mask<float>(in.mask[i] + c, block_rows), load(in.x[i] + c), absent);
      }
      put_columns(c, a);
    }
    for (; c < size_; c += block_rows) {
      for (int i = 0; i < block_rows; ++i) {
        const int64_t rest = in.size[i] - c, count = rest < block_rows ? rest : block_rows;
        if (count <= 0) {
          a[i] = absent;
          continue;
        }
        a[i] = torchlml::read(in.x[i] + c, count);
        const ifloat available = in.mask[i] ? load_mask<float>(in.mask[i] + c, count) : first_lanes<float>(count);
        a[i] = select<float>(available, a[i], absent);
      }
      put_columns(c, a);
    }
  }

  LML_INLINE void put_columns(int64_t c, vfloat (&a)[block_rows]) {
    transpose(a);
    for (int i = 0; i < block_rows; ++i) x_[c + i] = a[i];
  }

  static LML_INLINE ifloat available(vfloat x) { return x != splat(-infinity); }

  // ------------------------------------------------------------------ initial guess

  LML_INLINE void guess() {
    if (!gaps_) {
      active_ = find_moments<false>();
      gaps_ = any<float>(~active_);  // entries of -inf, which count as masked, also make a row inactive
    }
    if (gaps_) active_ = find_moments<true>();
    set_target(row_k_, row_k_low_);
    set_center();
  }

  // Computes the mean, variance and number of the available entries. Returns false for rows with entries that are huge
  // or not finite.
  template <bool gaps>
  LML_INLINE ifloat find_moments() {
    vfloat origin = x_[0];
    ifloat count{};
    if constexpr (gaps) {
      // Find the first available entry of each row. Most rows have one among the first few columns.
      for (int64_t j = 1; j < size_ && any<float>(~available(origin)); ++j) {
        origin = select<float>(available(origin), origin, x_[j]);
      }
    }
    vfloat sum[4] = {}, squares[4] = {};
    const auto add = [&](int64_t j, int into) __attribute__((always_inline)) {
      vfloat d = x_[j] - origin;
      if constexpr (gaps) {
        d = keep<float>(available(x_[j]), d);
        count -= available(x_[j]);
      }
      sum[into] += d;
      squares[into] += d * d;
    };
    int64_t j = 0;
    for (; j + 4 <= size_; j += 4) add(j, 0), add(j + 1, 1), add(j + 2, 2), add(j + 3, 3);
    for (int into = 0; j < size_; ++j, ++into) add(j, into);  // same result as with columns of zeros
    count_ = gaps ? __builtin_convertvector(count, vfloat) : splat(static_cast<float>(size_));
    const vfloat inverse = 1.0f / count_, mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * inverse;
    const vfloat square = ((squares[0] + squares[1]) + (squares[2] + squares[3])) * inverse;
    const vfloat variance = square - mean * mean;
    mean_ = origin + mean;
    variance_ = keep<float>(greater(variance, 0.0f), variance);
    return is_finite(mean_) & is_finite(square);  // if the squares overflow, the variance is unknown
  }

  // Computes the smaller of k and n - k, and the constants that the initial guess needs (see Target).
  LML_INLINE void set_target(vfloat k, vfloat k_low) {
    if (!any<float>((k != given_k_) | (k_low != given_k_low_) | (count_ != given_count_))) return;
    given_k_ = k, given_k_low_ = k_low, given_count_ = count_;
    const vfloat rest = count_ - k;
    flip_ = greater(k, rest);
    k_ = select<float>(flip_, rest, k);  // `rest` is exact if k is more than half of the count
    k_low_ = negate_where<float>(flip_, k_low);
    possible_ = greater(k_, 1e-3f);  // also false if k is at least the count
    const vfloat p = select<float>(possible_, k_ / count_, splat(0.25f)), t = vsqrt(-2.0f * vlog(p));
    probit_ =
        (2.515517f + t * (0.802853f + t * 0.010328f)) / (1.0f + t * (1.432788f + t * (0.189269f + t * 0.001308f))) - t;
    logit_ = vlog(p / (1.0f - p));
    tail_ = 0.5f - p;
  }

  // Sets the center to an approximation of -nu that assumes normally distributed entries.
  LML_INLINE void set_center() {
    const vfloat wide = vsqrt(variance_ + 2.5464791f) * probit_;  // 8 / pi
    const vfloat narrow = logit_ - variance_ * tail_;
    const vfloat nu = wide + (narrow - wide) * (2.0f / (2.0f + variance_));
    center_ = mean_ - negate_where<float>(flip_, nu);
    active_ &= possible_ & is_finite(center_);
    center_ = keep<float>(active_, center_);
  }

  // ------------------------------------------------------------------ search

  LML_INLINE void begin() {
    clamped_ = solved_ = ifloat{};
    delta_ = last_step_ = vfloat{};
    low_ = splat(static_cast<float>(-L::reach)), high_ = splat(static_cast<float>(L::reach));
    odds_ = splat(unscale);
    // Compute an upper bound on |x - center|. In most rows it is well within the range of the exponential.
    const vfloat furthest = vsqrt(count_ * variance_) + vabs(mean_ - center_);
    if (any<float>(flip_ | ~greater(splat(0.9f * L::top), furthest))) {
      gaps_ ? exponentials<true, true>() : exponentials<false, true>();
    } else {
      gaps_ ? exponentials<true, false>() : exponentials<false, false>();
    }
  }

  // Prefetches a part of the arrays that will be needed soon. Prefetching an invalid address is harmless.
  LML_INLINE void fetch(int64_t column) const {
    for (const char* array : soon_) __builtin_prefetch(array + column * column_bytes_);
  }

  // Calls f(begin, end) for every group of `columns_per_sum` columns.
  template <class F>
  LML_INLINE void each_columns(const F& f) const {
    for (int64_t begin = 0; begin < size_; begin += columns_per_sum) {
      f(begin, begin + columns_per_sum < size_ ? begin + columns_per_sum : size_);
    }
  }

  // Stores exp(+-(x - center)), scaled (see vmath.h), and sums the powers of r = 1 - y. Summing r instead of y loses
  // digits of a tiny y, but the first step needs only a few digits. If `any_row` is false, all z must be within the
  // range of the exponential and no target may be flipped. Both values of `any_row` give bitwise identical results.
  template <bool gaps, bool any_row>
  LML_INLINE void exponentials() {
    vfloat sum{}, squares{}, cubes[2] = {};
    each_columns([&](int64_t begin, int64_t end) __attribute__((always_inline)) {
      for (int64_t j = begin; j < end; ++j) {
        fetch(j);
        vfloat z = x_[j] - center_;
        if constexpr (any_row) {
          z = negate_where<float>(flip_, z);
          if constexpr (gaps) z = select<float>(available(x_[j]), z, splat(-infinity));
          clamped_ |= greater(z, L::top);
          e_[j] = vexp<Stored>(vmin(splat(L::top), z));
        } else {
          e_[j] = vexp<Within>(z);
          if constexpr (gaps) e_[j] = keep<float>(available(x_[j]), e_[j]);
        }
      }
      const auto add = [&](int64_t j, vfloat& cube) __attribute__((always_inline)) {
        vfloat r = reciprocal<true>(1.0f + e_[j] * unscale);
        if constexpr (gaps) r = keep<float>(available(x_[j]), r);
        const vfloat r2 = r * r;
        sum += r;
        squares += r2;
        cube += r2 * r;
      };
      int64_t j = begin;
      for (; j + 2 <= end; j += 2) add(j, cubes[0]), add(j + 1, cubes[1]);
      if (j < end) add(j, cubes[0]);
    });
    clamped_ &= flip_;
    residual_ = (count_ - k_) - sum;
    w_ = sum - squares;                                     // sum of r * (1 - r)
    bend_ = (squares - (cubes[0] + cubes[1])) * 2.0f - w_;  // sum of r * (1 - r) * (2 * r - 1)
  }

  // Computes the sums at delta (see SignedSums).
  LML_INLINE void look() {
    ColumnSum total;
    vfloat w_sum{}, wy_sum[2] = {};
    ifloat above{};
    const vfloat u = -odds_;
    each_columns([&](int64_t begin, int64_t end) __attribute__((always_inline)) {
      const auto add = [&](int64_t j, vfloat& wy) __attribute__((always_inline)) {
        // With negated odds, r is -(1 - y), which is the term of the sum if z > 0.
        const vfloat odds = e_[j] * u, r = reciprocal<true>(odds - 1.0f), y = odds * r, w = y * r;
        const ifloat over = greater(splat(-1.0f), odds);
        total.part += select<float>(over, r, y);
        w_sum -= w;
        wy -= w * y;
        above -= over;
      };
      int64_t j = begin;
      for (; j + 2 <= end; j += 2) add(j, wy_sum[0]), add(j + 1, wy_sum[1]);
      if (j < end) add(j, wy_sum[0]);
      total.flush();
    });
    const vfloat over = __builtin_convertvector(above, vfloat) - k_;
    const ExactSum residual(over, total.sum);
    residual_ = residual.sum + (residual.error + (total.error - k_low_));
    w_ = w_sum, bend_ = w_sum - 2.0f * (wy_sum[0] + wy_sum[1]);
  }

  // Takes a Halley step on log(sum(y)) - log(k) in the active lanes. A lane whose Newton step is short takes a
  // second-order step instead and is solved. A lane that leaves the range of its exponentials becomes inactive without
  // being solved.
  template <bool first>
  LML_INLINE void step() {
    active_ &= greater(w_, splat(static_cast<float>(L::slope)) * count_);
    const vfloat y = k_ + residual_, inverse = 1.0f / w_, newton = -residual_ * inverse, curvature = bend_ * inverse;
    if constexpr (!first) {
      const ifloat close = active_ & greater(splat(static_cast<float>(L::last_step)), vabs(newton));
      const vfloat s = newton * (1.0f - 0.5f * curvature * newton);
      last_step_ = select<float>(close, s, last_step_);
      odds_ = select<float>(close, odds_ * (1.0f + s * (1.0f + s * (0.5f + s * (1.0f / 6)))), odds_);
      solved_ |= close;
      active_ &= ~close;
      if (!any<float>(active_)) return;
    }
    const ifloat too_high = greater(residual_, 0.0f);
    high_ = select<float>(too_high, delta_, high_);
    low_ = select<float>(too_high, low_, delta_);
    const vfloat wide = -log_ratio(y, k_, residual_) * (y * inverse);
    const vfloat next_to = delta_ + wide / clamp(1.0f + 0.5f * wide * (curvature - w_ / y), 0.5f, 2.0f);
    const ifloat inside = greater(next_to, low_) & greater(high_, next_to);
    const vfloat reach = splat(static_cast<float>(L::reach));
    active_ &= inside | (greater(low_, -reach) & greater(reach, high_));
    const vfloat next = select<float>(inside, next_to, 0.5f * (low_ + high_));
    delta_ = select<float>(active_, next, delta_);
    odds_ = select<float>(active_, vexp(next) * unscale, odds_);
  }

  // ------------------------------------------------------------------ writing

  template <bool gaps, bool flips, class S>
  LML_INLINE void write_projection(S* const (&y)[block_rows], const int64_t (&size)[block_rows]) const {
    vfloat a[block_rows];
    int64_t c = 0;
    if (same_size_ && size_ >= block_rows) {
      for (bool last = false; !last; c += block_rows) {
        last = c + block_rows >= size_;
        if (last) c = size_ - block_rows;  // the last two square blocks may overlap
        for (int j = 0; j < block_rows; ++j) a[j] = projection<gaps, flips>(c + j);
        transpose(a);
        for (int i = 0; i < block_rows; ++i) store(y[i] + c, a[i]);
      }
      return;
    }
    for (; c < size_; c += block_rows) {
      for (int j = 0; j < block_rows; ++j) a[j] = projection<gaps, flips>(c + j);
      transpose(a);
      for (int i = 0; i < block_rows; ++i) {
        const int64_t rest = size[i] - c;
        if (rest > 0) torchlml::write(y[i] + c, a[i], rest < block_rows ? rest : int64_t{block_rows});
      }
    }
  }

  template <bool gaps, bool flips>
  LML_INLINE vfloat projection(int64_t j) const {
    const vfloat odds = e_[j] * odds_, r = reciprocal(1.0f + odds), t = odds * r;
    const ifloat over = greater(odds, 1.0f);
    // The smaller of t and 1 - t has full relative accuracy. Computing the larger from it preserves the order of the
    // entries, whereas odds * r does not preserve the order near 1.
    const vfloat small = select<float>(over, r, 1.0f - t), large = select<float>(over, 1.0f - r, t);
    const vfloat y = vmin(flips ? select<float>(flip_, small, large) : large, splat(1.0f));
    return gaps ? keep<float>(available(x_[j]), y) : y;
  }

  bool same_size_, gaps_;
  const char* soon_[2];
  int64_t column_bytes_;
  int64_t size_;  // the size of the longest row
  vfloat count_, mean_, variance_;
  vfloat row_k_, row_k_low_;
  vfloat given_k_{}, given_k_low_{}, given_count_{}, probit_, logit_, tail_;
  ifloat possible_;
  ifloat flip_;       // k > n / 2: solve LML_(n-k)(-x) = 1 - LML_k(x), whose sums are small
  vfloat k_, k_low_;  // the smaller of k and n - k, as an unevaluated sum
  vfloat center_, delta_, last_step_, low_, high_;
  vfloat odds_;                 // exp(z) = e * odds, or exp(-z) = e * odds for a flipped target
  vfloat residual_, w_, bend_;  // the sums at delta
  ifloat active_, solved_, clamped_;
  // The padding avoids false dependencies between loads and earlier stores, because the processor compares only the
  // last 12 bits of their addresses.
  vfloat x_[short_row + block_rows + 2048 / LML_VECTOR_BYTES], e_[short_row + block_rows];
};

}  // namespace
}  // namespace torchlml
