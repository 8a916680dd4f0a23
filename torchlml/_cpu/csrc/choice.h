// Hard and random choices: a mask of the k largest entries, and a systematic sample.
#pragma once

#include "forward.h"

namespace torchlml {
namespace {

template <class T>
LML_INLINE int64_t count_above(const T* x, int64_t n, T pivot) {
  Mask<T> above{};
  int64_t i = 0;
  for (; i + lanes<T> <= n; i += lanes<T>) above += greater(load(x + i), pivot);
  if (i < n) above += greater(load_part(x + i, n - i), pivot) & first_lanes<T>(n - i);
  return -total_lanes(above);
}

// Returns the k-th largest of n entries, where 1 <= k <= n and no entry is NaN. Counting is many times cheaper than
// moving entries, so pivots bracket the result first, and a selection among the few entries between them finishes the
// search.
template <class T>
T select_largest(const T* x, int64_t n, int64_t k, Target& target, T* room) {
  constexpr int64_t few = 96;
  T low = -static_cast<T>(HUGE_VAL), high = static_cast<T>(HUGE_VAL);
  int64_t above_low = n, above_high = 0;  // number of entries above each pivot: above_high < k <= above_low
  if (n > few && k < n) {
    target.set(static_cast<double>(k) - 0.5, n);
    const Moments row = moments(x, target);
    const double deviation = ::sqrt(row.variance);
    // The density of entries near the result, if they are normally distributed. A count divided by it is a distance in
    // standard deviations.
    const double density = static_cast<double>(n) * 0.3989422804 * ::exp(-0.5 * target.probit * target.probit);
    double pivot = row.mean - deviation * target.probit;
    for (int pass = 0; pass < 8 && above_low - above_high > few; ++pass) {
      const T at = static_cast<T>(pivot);
      if (!(at > low && at < high)) break;
      const int64_t above = count_above(x, n, at);
      if (above >= k) {
        low = at, above_low = above;
      } else {
        high = at, above_high = above;
      }
      const double l = static_cast<double>(low), h = static_cast<double>(high);
      // Aim slightly beyond the result, so that the next pivot tightens the other side of the bracket.
      const double missing = static_cast<double>(above - k), margin = above >= k ? few / 4 : -few / 4;
      pivot = static_cast<double>(at) + deviation * (missing + margin) / density;
      if (!(pivot > l && pivot < h) || pass > 3) pivot = 0.5 * l + 0.5 * h;
    }
  }
  int64_t size = 0;
  const bool closed = low > -static_cast<T>(HUGE_VAL);  // if false, entries of -inf are also candidates
  each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec<T> a = read(x + i, count);
    if (closed && count == lanes<T> && !any<T>(greater(a, low) & ~greater(a, high))) return;
    for (int64_t j = i; j < i + count; ++j) {
      room[size] = x[j];
      size += (!closed || x[j] > low) && x[j] <= high;
    }
  });
  return kth_largest(room, size, k - above_high);
}

template <class S>
struct ChoiceRow : Row<S> {
  using typename Row<S>::T;
  using Row<S>::x, Row<S>::mask, Row<S>::n;
  S* y;

  void fill(T value) const {
    for (int64_t i = 0; i < n; ++i) store_one(y + i, value);
  }

  // Returns the entries in the work dtype, with -inf for masked entries, or the row itself if no conversion is needed.
  const T* values(Scratch<T>& copy) const {
    if constexpr (sizeof(S) == sizeof(T)) {
      if (!mask) return x;
    }
    T* to = copy.room(n);
    const Vec<T> absent = splat(-static_cast<T>(HUGE_VAL));
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> a = read(x + i, count);
      write(to + i, mask ? select<T>(load_mask<T>(mask + i, count), a, absent) : a, count);
    });
    return to;
  }

  void choose(double k, Target& target, Scratch<T>& copy, Scratch<T>& room) const {
    const T* v = values(copy);
    Mask<T> odd{};
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> a = read(v + i, count);
      odd |= a != a;
    });
    if (k != k || any<T>(odd)) return fill(static_cast<T>(NAN));
    if (!(k >= 1) || n == 0) return fill(0);
    const int64_t wanted = k < static_cast<double>(n) ? static_cast<int64_t>(k) : n;
    const T threshold = select_largest(v, n, wanted, target, room.room(n));
    int64_t left = wanted - count_above(v, n, threshold);
    // Ties are resolved in favor of lower indices. An entry of -inf is never chosen.
    if (!(threshold > -static_cast<T>(HUGE_VAL))) left = 0;
    const Vec<T> one = splat(T{1});
    each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> a = read(v + i, count);
      Vec<T> out = keep<T>(greater(a, threshold), one);
      if (left > 0 && any<T>(a == threshold)) {
        for (int64_t j = 0; j < count && left > 0; ++j) {
          if (a[j] == threshold) out[j] = 1, --left;
        }
      }
      write(y + i, out, count);
    });
  }
};

template <class S>
void topk_mask_rows(const TopkMaskArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> copy, room;
  Target target;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(args.batch, r);
    const ChoiceRow<S> row{{args.batch, span}, part_of<S>(args.y, span)};
    row.choose(args.k[r * args.k_stride], target, copy, room);
  }
}

// Calls f(a, i) for each vector a of a row, converted to double and padded with zeros, where i is the index of its
// first entry.
template <class S, class F>
LML_INLINE void each_double(const S* p, int64_t n, const F& f) {
  using T = typename Work<S>::type;
  each_vector<T>(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec<T> a = read(p + i, count);
    if constexpr (sizeof(T) == 8) {
      f(a, i);
    } else {
      half_vfloat half[2];
      std::memcpy(half, &a, sizeof a);
      f(__builtin_convertvector(half[0], vdouble), i);
      if (count > lanes<double>) f(__builtin_convertvector(half[1], vdouble), i + lanes<double>);
    }
  });
}

// Converts the probabilities of a row to integer multiples of 2^-bits that sum to exactly k, so that their cumulative
// sums are exact.
struct Units {
  int bits = 44;
  explicit Units(int64_t n) {
    while (bits > 8 && n >= int64_t{1} << (60 - bits)) --bits;
  }
  int64_t one() const { return int64_t{1} << bits; }

  // Writes the multiple for each entry to `length`, which must have space for n entries plus one vector.
  template <class S>
  LML_INLINE void fill(const S* p, int64_t n, double k, int64_t* length) const {
    vdouble sums{}, slacks{};  // slacks: the sums of 1 - p over the positive entries
    each_double(p, n, [&](vdouble a, int64_t) __attribute__((always_inline)) {
      sums += a;
      slacks += keep<double>(greater(a, 0.0), 1 - a);
    });
    const double sum = total(sums), slack = total(slacks), missing = k - sum;
    // Correct the rounding error of the sum: decrease all entries in proportion to p, or increase them in proportion to
    // 1 - p.
    const double grow = missing > 0 && slack > 0 ? (missing < slack ? missing / slack : 1) : 0;
    const double factor = (missing < 0 ? k / sum : 1) * static_cast<double>(one());
    constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the rounded integer in the low bits
    idouble lengths{};
    each_double(p, n, [&](vdouble a, int64_t i) __attribute__((always_inline)) {
      const vdouble b = keep<double>(greater(a, 0.0), (a + (1 - a) * grow) * factor);
      const idouble whole = cast_bits<idouble>(b + shift) - cast_bits<int64_t>(shift);
      std::memcpy(length + i, &whole, sizeof whole);
      lengths += whole;
    });
    // Because of rounding, the sum may be a few units above or below k. Adjust entries until it is exact.
    int64_t left = (static_cast<int64_t>(k) << bits) - total_lanes(lengths);
    for (int64_t i = 0; i < n && left != 0; ++i) {
      if (length[i] == 0) continue;
      const int64_t least = -length[i], most = one() - length[i];
      const int64_t step = left < least ? least : left > most ? most : left;
      length[i] += step;
      left -= step;
    }
  }
};

// Calls f(i, i % 4) for every index i in a row. The second argument is a column. Each of the four columns has its own
// sums, which shortens the dependency chains.
template <class F>
LML_INLINE void each_place(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) f(i, 0), f(i + 1, 1), f(i + 2, 2), f(i + 3, 3);
  for (int column = 0; i < n; ++i, ++column) f(i, column);
}

template <class S>
void systematic_sample_rows(const SystematicSampleArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<int64_t> lengths;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(args.batch, r);
    const S* p = part_of<S>(args.batch.x, span);
    const uint8_t* key = args.keys + span.begin;
    S* y = part_of<S>(args.y, span);
    const int64_t n = span.size;
    const double asked = args.k[r * args.k_stride], all = static_cast<double>(n), k = asked < all ? asked : all;
    if (n > 0 && load_one(p) != load_one(p)) {  // if a row contains a NaN, all of its entries are NaN
      for (int64_t i = 0; i < n; ++i) store_one(y + i, static_cast<T>(NAN));
      continue;
    }
    const Units units(n);
    int64_t* length = lengths.room(n + lanes<T>);
    units.fill(p, n, k, length);
    // The entries are ordered by the six high bits of their keys, then by column, then by index. First compute the
    // position at which each combination of key and column begins.
    int64_t at[64][4] = {};
    each_place(n, [&](int64_t i, int column) { at[key[i] >> 2][column] += length[i]; });
    const int64_t fraction = units.one() - 1;
    int64_t place = fraction - static_cast<int64_t>(args.start[r] * static_cast<double>(units.one()));
    for (auto& columns : at) {
      for (int64_t& sum : columns) {
        const int64_t size = sum;
        sum = place & fraction;
        place += size;
      }
    }
    // An entry is sampled if its interval contains an integer.
    each_place(n, [&](int64_t i, int column) {
      int64_t& end = at[key[i] >> 2][column];
      const int64_t next = end + length[i];
      end = next & fraction;
      store_one(y + i, static_cast<T>(static_cast<int>(next >> units.bits)));
    });
  }
}

}  // namespace
}  // namespace torchlml
