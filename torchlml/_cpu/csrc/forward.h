// The forward pass. Short rows are solved one per vector lane (`LaneBlock`), and the solves of longer rows are
// interleaved (`SideBySide`). `ForwardRow::general` handles the remaining rows, such as longer rows with a mask and
// rows with infinities.
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

  // A bound on the sum restricts nu to one sign. If the nu that gives sum(y) = k has the other sign, nu is 0 and the
  // row is called free.
  bool is_free(double nu) const { return bound == Bound::at_most ? nu >= 0 : bound == Bound::at_least && nu <= 0; }
  LML_INLINE void free_row() const {
    set_nu(0, 0);
    write_from_nu();
  }

  // Sets y to `value` for the available entries for which `chosen(x)` is true, and to 0 for all other entries. Writes
  // log y if that is the output.
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

  // Writes y = e * u / (1 + e * u) from the exponentials e, which may be stored in y itself.
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

  // Writes nu and y or log y for a solved row. `e` contains the exponentials, as in `write_from_odds`.
  LML_INLINE void write_solved(const T* e, const Fit<T>& fit, bool flip) const {
    set_nu(fit.nu);
    if (fit.status != Fit<T>::solved || fit.clamped || output != Output::projection) return write_from_nu();
    flip ? write_from_odds<true>(e, fit) : write_from_odds<false>(e, fit);
  }

  // Copies the finite available entries of [begin, begin + length) to `to`, counts the entries of +inf and detects NaN.
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

  // Handles masks, infinities, NaN, and a k that is not between 0 and the number of available entries. The finite
  // available entries are solved as a separate row.
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

// Interleaves the solves of several rows without masks. Between two passes over a row there is a chain of dependent
// divisions, and the processor can overlap the chains of several short rows.
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

// Blocks of short rows that are solved with one row per lane.
template <class S>
class LaneBlock {
  static constexpr int most_blocks = 2;
  // The number of columns, in both blocks together, that fit into the L1 cache.
  static constexpr int64_t most_columns = 2048 / block_rows;

 public:
  explicit LaneBlock(const ForwardArgs& args) : args_(args) {}
  static constexpr bool takes(int64_t n) { return n <= short_row; }

  // Adds a row with 0 < k < n. Finishes the blocks when they are full.
  template <class F>
  LML_INLINE void add(int64_t r, const Span& span, double k, const F& otherwise) {
    LaneSolver::Input<S>& in = in_[count_ / block_rows];
    const int i = count_ % block_rows;
    rows_[count_] = r, begin_[count_] = span.begin;
    in.x[i] = static_cast<const S*>(args_.batch.x) + span.begin;
    in.mask[i] = args_.batch.mask ? args_.batch.mask + span.begin : nullptr;
    in.size[i] = span.size;
    in.k_high[i] = static_cast<float>(k);
    in.k_low[i] = static_cast<float>(k - static_cast<double>(in.k_high[i]));
    ++count_;
    if (count_ == most_blocks * block_rows || (count_ == block_rows && 2 * span.size > most_columns)) finish(otherwise);
  }

  // Solves and writes the rows, and empties the blocks. Calls `otherwise(row, k)` for rows that were not solved.
  template <class F>
  void finish(const F& otherwise) {
    if (count_ == 0) return;
    const int blocks = (count_ + block_rows - 1) / block_rows;
    for (int i = count_; i < blocks * block_rows; ++i) {
      LaneSolver::Input<S>& in = in_[blocks - 1];
      const int lane = i % block_rows;
      in.x[lane] = in.x[0], in.mask[lane] = in.mask[0], in.size[lane] = in.size[0];
      in.k_high[lane] = in.k_high[0], in.k_low[lane] = in.k_low[0];
    }
    const int64_t entries = begin_[count_ - 1] + in_[blocks - 1].size[(count_ - 1) % block_rows] - begin_[0];
    for (int b = 0; b < blocks; ++b) {
      in_[b].soon[0] = in_[b].x[0] + entries;
      in_[b].soon[1] = args_.y ? static_cast<const S*>(args_.y) + begin_[b * block_rows] : in_[b].soon[0];
      solver_[b].read(in_[b]);
    }
    LaneSolver::solve(solver_, blocks);
    for (int b = 0; b < blocks; ++b) write(b, otherwise);
    count_ = 0;
  }

 private:
  template <class F>
  LML_INLINE void write(int b, const F& otherwise) {
    const LaneSolver& solver = solver_[b];
    const int first = b * block_rows, count = count_ - first < block_rows ? count_ - first : block_rows;
    float high[block_rows], low[block_rows];
    solver.nu(high, low);
    const bool ordinary = args_.bound == Bound::exactly && args_.output != Output::logarithm;
    ifloat left = ~solver.solved();
    if (args_.output == Output::projection) left |= solver.clamped();
    if (!ordinary) left = ~ifloat{};
    S* y[block_rows];
    for (int i = 0; i < count; ++i) {
      float* nu = static_cast<float*>(args_.nu) + rows_[first + i];
      nu[0] = high[i], nu[args_.batch.rows] = low[i];
      y[i] = static_cast<S*>(args_.y) + begin_[first + i];
    }
    for (int i = count; i < block_rows; ++i) y[i] = nowhere_;
    if (any<float>(left)) {
      for (int i = 0; i < count; ++i) {
        if (left[i]) y[i] = write_alone(b, i, otherwise) ? nowhere_ : y[i];
      }
    }
    if (args_.output == Output::projection) solver.write(y, in_[b].size);
  }

  // Writes a row that needs special treatment. Returns false for other rows, which `LaneSolver::write` should write.
  template <class F>
  __attribute__((noinline)) bool write_alone(int b, int i, const F& otherwise) const {
    const LaneSolver& solver = solver_[b];
    const int64_t r = rows_[b * block_rows + i];
    const Span span{begin_[b * block_rows + i], in_[b].size[i]};
    const ForwardRow<S> row = forward_row<S>(args_, span, r, nullptr);
    if (!solver.solved()[i]) {
      otherwise(row, args_.k[r * args_.k_stride]);
    } else if (row.is_free(static_cast<double>(*row.nu_high))) {
      row.free_row();
    } else if (args_.output == Output::projection && !solver.clamped()[i]) {
      return false;
    } else {
      row.write_from_nu();
    }
    return true;
  }

  const ForwardArgs& args_;
  int count_ = 0;
  int64_t rows_[most_blocks * block_rows], begin_[most_blocks * block_rows];
  LaneSolver::Input<S> in_[most_blocks];
  LaneSolver solver_[most_blocks];
  S nowhere_[short_row];  // a dummy output for lanes whose results are discarded
};
// Lanes compute in float32, so float64 rows are never solved in lanes.
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
