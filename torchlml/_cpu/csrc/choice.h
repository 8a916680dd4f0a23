// Hard and random choices: ones at the k largest entries, and a systematic sample.
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

// The k-th largest of n entries without a NaN, 1 <= k <= n. Counting is many times cheaper than moving entries
// about: pivots close in on the place, and a selection among the few between them ends the search.
template <class T>
T select_largest(const T* x, int64_t n, int64_t k, Target& target, T* room) {
  constexpr int64_t few = 96;
  T low = -static_cast<T>(HUGE_VAL), high = static_cast<T>(HUGE_VAL);
  int64_t above_low = n, above_high = 0;  // as many are larger: k <= above_low, above_high < k
  if (n > few && k < n) {
    target.set(static_cast<double>(k) - 0.5, n);
    const Moments row = moments(x, target);
    const double deviation = ::sqrt(row.variance);
    // The density near the place, from the normal distribution: it turns a count into a distance.
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
      // A little beyond the place, so that the next pivot closes the other side.
      const double missing = static_cast<double>(above - k), margin = above >= k ? few / 4 : -few / 4;
      pivot = static_cast<double>(at) + deviation * (missing + margin) / density;
      if (!(pivot > l && pivot < h) || pass > 3) pivot = 0.5 * l + 0.5 * h;
    }
  }
  int64_t size = 0;
  const bool closed = low > -static_cast<T>(HUGE_VAL);  // otherwise entries of -inf take part
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

  // The entries in the work dtype, -inf where masked: the row itself, if it is that already.
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
    // Among equal entries those of lower index are taken; an entry of -inf never is.
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

// Calls f with the entries of a row in double, one vector after the other (the last filled up with zeros), and
// their place.
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

// The probabilities of a row in whole units of 2^-bits that sum to k exactly, so that nothing is rounded while
// they are laid end to end.
struct Units {
  int bits = 44;
  explicit Units(int64_t n) {
    while (bits > 8 && n >= int64_t{1} << (60 - bits)) --bits;
  }
  int64_t one() const { return int64_t{1} << bits; }

  // `length` has room for n entries and a vector.
  template <class S>
  LML_INLINE void fill(const S* p, int64_t n, double k, int64_t* length) const {
    vdouble sums{}, rooms{};  // rooms: how much the positive ones can grow
    each_double(p, n, [&](vdouble a, int64_t) __attribute__((always_inline)) {
      sums += a;
      rooms += keep<double>(greater(a, 0.0), 1 - a);
    });
    const double sum = total(sums), room = total(rooms), missing = k - sum;
    // What rounding left of k goes to all in proportion: to what they have, or to what they lack.
    const double grow = missing > 0 && room > 0 ? (missing < room ? missing / room : 1) : 0;
    const double factor = (missing < 0 ? k / sum : 1) * static_cast<double>(one());
    constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52: the integer lands in the low bits
    idouble lengths{};
    each_double(p, n, [&](vdouble a, int64_t i) __attribute__((always_inline)) {
      const vdouble b = keep<double>(greater(a, 0.0), (a + (1 - a) * grow) * factor);
      const idouble whole = cast_bits<idouble>(b + shift) - cast_bits<int64_t>(shift);
      std::memcpy(length + i, &whole, sizeof whole);
      lengths += whole;
    });
    // A few units may be left still.
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

// Calls f for every place of a row and its column, one of four: sums of their own seldom wait for each other.
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
    if (n > 0 && load_one(p) != load_one(p)) {  // a NaN makes the whole row NaN
      for (int64_t i = 0; i < n; ++i) store_one(y + i, static_cast<T>(NAN));
      continue;
    }
    const Units units(n);
    int64_t* length = lengths.room(n + lanes<T>);
    units.fill(p, n, k, length);
    // The order is that of the keys' six high bits, then of four columns, then of the places. First, where each key
    // and column begins:
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
    // Where an entry's end passes a whole number, it has a tooth of the comb.
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
