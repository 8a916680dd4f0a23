// The forward pass of one row: special rows, general rows with masks or infinities, and ordinary rows.
#pragma once

#include "lanes.h"

namespace torchlml {
namespace {

template <class S>
struct ForwardRow : Row<S> {
  using typename Row<S>::T;
  using Row<S>::x, Row<S>::mask, Row<S>::n, Row<S>::team;
  Output output;
  Bound bound;
  S* y;
  T* nu_high;
  T* nu_low;

  void set_nu(T high, T low) const {
    *nu_high = high;
    *nu_low = low;
  }
  void set_nu(const Threshold& nu) const {
    const T high = static_cast<T>(nu.delta - nu.center);
    set_nu(high, static_cast<T>((-nu.center - static_cast<double>(high)) + nu.delta));
  }

  // A bound on the sum clamps nu to one sign. If the nu of sum y = k has the other sign, the row is free, with nu = 0.
  bool is_free(double nu) const { return bound == Bound::at_most ? nu >= 0 : bound == Bound::at_least && nu <= 0; }
  LML_INLINE void free_row() const {
    set_nu(0, 0);
    write_from_nu();
  }

  // Sets y to `value` for the available entries with `chosen(x)`, and to 0 for all other entries.
  template <class F>
  void fill(T value, const F& chosen) const {
    if (output == Output::none) return;
    const bool log = output == Output::logarithm;
    const T yes = log ? static_cast<T>(::log(static_cast<double>(value))) : value;
    const T no = log ? -static_cast<T>(HUGE_VAL) : 0;
    each_part(n, team, [=, *this](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; ++i) {
        store_one(y + i, this->available(i) && chosen(load_one(x + i)) ? yes : no);
      }
    });
  }

  void nan_row() const {
    const T nan = static_cast<T>(NAN);
    set_nu(nan, 0);
    if (output == Output::none) return;
    each_part(n, team, [=, *this](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; ++i) store_one(y + i, nan);
    });
  }

  // Writes y or log y from x and the current nu. Handles infinities and masks.
  LML_INLINE void write_from_nu() const {
    if (output == Output::none) return;
    const T high = *nu_high, low = *nu_low;
    const bool log = output == Output::logarithm;
    each_vector<T>(n, team, [=, *this](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> z = (read(x + i, count) + high) + low;
      const Logistic<T> at(z);
      Vec<T> out = log ? keep<T>(greater(Vec<T>{}, z), z) - vlog1p(at.a) : at.sigma(z);
      if (mask) {
        const Vec<T> zero = splat(log ? -static_cast<T>(HUGE_VAL) : T{0});
        out = select<T>(load_mask<T>(mask + i, count), out, zero);
      }
      write(y + i, out, count);
    });
  }

  // Writes y = e u / (1 + e u) from the stored exponentials, which may be in y itself.
  template <bool flip>
  LML_INLINE void write_from_odds(const T* e, const Fit<T>& fit) const {
    const T u = static_cast<T>(fit.odds);
    const Vec<T> tail = fit.tail;
    each_vector<T>(n, team, [=, y = y](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<T> odds = (count == lanes<T> ? load(e + i) : tail) * u;
      const Vec<T> r = reciprocal(1 + odds), t = odds * r;
      const Mask<T> over = greater(odds, T{1});
      // The smaller of y and 1 - y has full relative accuracy, so the larger is computed from it.
      write(y + i, flip ? select<T>(over, r, 1 - t) : select<T>(over, 1 - r, t), count);
    });
  }

  // Writes nu and y or log y of a solved row. `e` contains the exponentials, as in `write_from_odds`.
  LML_INLINE void write_solved(const T* e, const Fit<T>& fit, bool flip) const {
    set_nu(fit.nu);
    if (fit.status != Fit<T>::solved || fit.clamped || output != Output::projection) return write_from_nu();
    flip ? write_from_odds<true>(e, fit) : write_from_odds<false>(e, fit);
  }

  // Copies the finite available entries of [begin, begin + length) to `to`, and counts the special entries.
  struct Packed {
    int64_t begin, size, infinite;
    bool nan;
  };
  Packed pack(int64_t begin, int64_t length, T* to) const {
    Packed found{0, 0, 0, false};
    for (int64_t i = begin; i < begin + length; ++i) {
      if (!this->available(i)) continue;
      const T a = load_one(x + i);
      found.nan |= a != a;
      found.infinite += a == static_cast<T>(HUGE_VAL);
      to[found.size] = a;
      found.size += a - a == 0;
    }
    return found;
  }

  // Handles masks, infinities, NaN, k <= 0 and k >= m. The finite available entries are solved as a row of their own.
  void general(double k, Scratch<T>& packed, Scratch<T>& work) const {
    T* finite = packed.room(n);
    T* room = work.room(n);
    int64_t size = 0, infinite = 0;
    bool nan = k != k;
    if (n <= long_row) {
      const Packed all = pack(0, n, finite);
      size = all.size, infinite = all.infinite, nan |= all.nan;
    } else {
      Scratch<Packed> scratch;
      Packed* pieces = scratch.room((n + piece_size - 1) / piece_size);
      each_piece(n, team,
                 [&](int64_t i, int64_t begin, int64_t length) { pieces[i] = pack(begin, length, room + begin); });
      for (int64_t i = 0; i * piece_size < n; ++i) {
        pieces[i].begin = size;
        size += pieces[i].size, infinite += pieces[i].infinite, nan |= pieces[i].nan;
      }
      each_piece(n, team, [&](int64_t i, int64_t begin, int64_t) {
        ::memcpy(finite + pieces[i].begin, room + begin, sizeof(T) * static_cast<size_t>(pieces[i].size));
      });
    }
    const T infinity = static_cast<T>(HUGE_VAL);
    const auto is_infinite = [=](T a) { return a == infinity; };
    if (nan) return nan_row();
    if (k <= 0) {
      if (is_free(-infinity)) return free_row();
      set_nu(-infinity, 0);
      return fill(0, [](T) { return false; });
    }
    if (k >= static_cast<double>(size + infinite)) {
      if (is_free(infinity)) return free_row();
      set_nu(infinity, 0);
      return fill(1, [=](T a) { return a > -infinity; });
    }
    if (static_cast<double>(infinite) >= k) {
      if (is_free(-infinity)) return free_row();
      set_nu(-infinity, 0);
      return fill(static_cast<T>(k / static_cast<double>(infinite)), is_infinite);
    }
    Target target;
    target.set(k - static_cast<double>(infinite), size);
    Fit<T> fit = fit_row<T>(finite, target, room, team);
    if (fit.status == Fit<T>::not_finite) fit = fit_hard_row<T>(finite, target, room, team);
    if (is_free(fit.nu.delta - fit.nu.center)) return free_row();
    set_nu(fit.nu);
    write_from_nu();
  }
};

// Interleaves the solves of several ordinary rows. A chain of divisions separates two passes over a row, and the
// processor can overlap the chains of several short rows.
template <class S>
class SideBySide {
  using T = typename Work<S>::type;
  static constexpr int most_rows = 8;
  static constexpr int64_t most_entries = 2048;  // fits into the L1 cache

 public:
  bool has_room(int64_t n) const { return count_ == 0 || (count_ < most_rows && entries_ + n <= most_entries); }

  void add(const ForwardRow<S>& row, double k) {
    last_.set(k, row.n);
    rows_[count_] = row, targets_[count_] = last_;
    ++count_, entries_ += row.n;
  }

  // Solves and writes the rows, and empties the block. Calls `general(row, k)` for rows that are not finite.
  template <class F>
  void finish(const F& general) {
    T *e[most_rows], center[most_rows];
    bool going[most_rows];
    int64_t before = 0;
    for (int i = 0; i < count_; ++i) {
      center[i] = static_cast<T>(-guess(rows_[i].x, targets_[i]));
      // The output also serves as space for the exponentials if it has the right type.
      e[i] = sizeof(S) == sizeof(T) && rows_[i].y ? reinterpret_cast<T*>(rows_[i].y) : room_.room(entries_) + before;
      before += rows_[i].n;
    }
    for (int i = 0; i < count_; ++i) newton_[i].begin(rows_[i].x, targets_[i], center[i], e[i], rows_[i].team);
    for (int i = 0; i < count_; ++i) going[i] = newton_[i].advance();
    for (int i = 0; i < count_; ++i) {
      if (going[i]) newton_[i].look();
    }
    for (int i = 0; i < count_; ++i) {
      if (going[i]) newton_[i].search();
    }
    for (int i = 0; i < count_; ++i) {
      const ForwardRow<S>& row = rows_[i];
      Fit<T> fit = newton_[i].fit();
      if (fit.status == Fit<T>::declined) fit = fit_hard_row(row.x, targets_[i], e[i], row.team);
      if (fit.status == Fit<T>::not_finite) {
        general(row, targets_[i].k);
      } else if (row.is_free(fit.nu.delta - fit.nu.center)) {
        row.free_row();
      } else {
        row.write_solved(e[i], fit, targets_[i].flip);
      }
    }
    count_ = 0, entries_ = 0;
  }

 private:
  int count_ = 0;
  int64_t entries_ = 0;
  Target last_, targets_[most_rows];
  ForwardRow<S> rows_[most_rows];
  Newton<T> newton_[most_rows];
  Scratch<T> room_;
};

template <class S>
ForwardRow<S> forward_row(const ForwardArgs& args, const Span& span, int64_t r, Team team) {
  using T = typename Work<S>::type;
  T* nu = static_cast<T*>(args.nu) + r;
  return {{args.batch, span, team}, args.output, args.bound, part_of<S>(args.y, span), nu, nu + args.batch.rows};
}

// A block of short rows that are solved one per lane.
template <class S>
class LaneBlock {
 public:
  explicit LaneBlock(const ForwardArgs& args) : args_(args) {}
  static constexpr bool takes(int64_t n) { return n <= short_row; }

  // Adds a row with 0 < k < n. Finishes the block when it is full.
  template <class F>
  LML_INLINE void add(int64_t r, const Span& span, double k, const F& otherwise) {
    rows_[count_] = r, begin_[count_] = span.begin;
    in_.x[count_] = static_cast<const S*>(args_.batch.x) + span.begin;
    in_.mask[count_] = args_.batch.mask ? args_.batch.mask + span.begin : nullptr;
    in_.size[count_] = span.size;
    in_.k_high[count_] = static_cast<float>(k);
    in_.k_low[count_] = static_cast<float>(k - static_cast<double>(in_.k_high[count_]));
    if (++count_ == block_rows) finish(otherwise);
  }

  // Solves and writes the rows, and empties the block. Calls `otherwise(row, k)` for rows that were not solved.
  template <class F>
  void finish(const F& otherwise) {
    if (count_ == 0) return;
    for (int i = count_; i < block_rows; ++i) {
      in_.x[i] = in_.x[0], in_.mask[i] = in_.mask[0], in_.size[i] = in_.size[0];
      in_.k_high[i] = in_.k_high[0], in_.k_low[i] = in_.k_low[0];
    }
    solver_.solve(in_);
    float high[block_rows], low[block_rows];
    solver_.nu(high, low);
    const bool ordinary = args_.bound == Bound::exactly && args_.output != Output::logarithm;
    ifloat left = ~solver_.solved();
    if (args_.output == Output::projection) left |= solver_.clamped();
    if (!ordinary) left = ~ifloat{};
    S* y[block_rows];
    for (int i = 0; i < count_; ++i) {
      static_cast<float*>(args_.nu)[rows_[i]] = high[i];
      static_cast<float*>(args_.nu)[rows_[i] + args_.batch.rows] = low[i];
      y[i] = static_cast<S*>(args_.y) + begin_[i];
    }
    for (int i = count_; i < block_rows; ++i) y[i] = nowhere_;
    if (any<float>(left)) {
      for (int i = 0; i < count_; ++i) {
        if (left[i]) y[i] = write_alone(i, otherwise) ? nowhere_ : y[i];
      }
    }
    if (args_.output == Output::projection) solver_.write(y, in_.size);
    count_ = 0;
  }

 private:
  // Writes a row that needs special treatment. Returns false if `LaneSolver::write` should write it after all.
  template <class F>
  __attribute__((noinline)) bool write_alone(int i, const F& otherwise) const {
    const Span span{begin_[i], in_.size[i]};
    const ForwardRow<S> row = forward_row<S>(args_, span, rows_[i], nullptr);
    if (!solver_.solved()[i]) {
      otherwise(row, args_.k[rows_[i] * args_.k_stride]);
    } else if (row.is_free(static_cast<double>(*row.nu_high))) {
      row.free_row();
    } else if (args_.output == Output::projection && !solver_.clamped()[i]) {
      return false;
    } else {
      row.write_from_nu();
    }
    return true;
  }

  const ForwardArgs& args_;
  int count_ = 0;
  int64_t rows_[block_rows], begin_[block_rows];
  LaneSolver::Input<S> in_;
  LaneSolver solver_;
  S nowhere_[short_row];  // the output of lanes whose results are discarded
};
// Lanes are float32. Rows of float64 are solved one by one.
template <>
class LaneBlock<double> {
 public:
  explicit LaneBlock(const ForwardArgs&) {}
  static constexpr bool takes(int64_t) { return false; }
  template <class F>
  void add(int64_t, const Span&, double, const F&) {}
  template <class F>
  void finish(const F&) {}
};

template <class S>
void forward_rows(const ForwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> packed, work;
  SideBySide<S> block;
  LaneBlock<S> short_rows(args);
  const auto general = [&](const ForwardRow<S>& row, double k) { row.general(k, packed, work); };
  const auto one_by_one = [&](const ForwardRow<S>& row, double k) {
    if (row.mask) return general(row, k);
    if (!block.has_room(row.n)) block.finish(general);
    block.add(row, k);
  };
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(args.batch, r);
    const double k = args.k[r * args.k_stride];
    const bool inside = k > 0 && k < static_cast<double>(span.size);
    if (inside && LaneBlock<S>::takes(span.size)) {
      short_rows.add(r, span, k, one_by_one);
      continue;
    }
    const ForwardRow<S> row = forward_row<S>(args, span, r, rows.team);
    inside ? one_by_one(row, k) : general(row, k);
  }
  short_rows.finish(one_by_one);
  block.finish(general);
}

}  // namespace
}  // namespace torchlml
