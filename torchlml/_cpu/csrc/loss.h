// The LML loss of one row, -sum(c * log(y)) over its labels, and its derivatives.
#pragma once

#include "backward_rows.h"

namespace torchlml {
namespace {

// Calls f(place, c) for each label of one row, where `place` is the label's index in the row and c is its weight.
template <class T, class F>
LML_INLINE void each_label(const LabelArgs& labels, const Batch& batch, int64_t r, const Span& span, const F& f) {
  const T* weight = static_cast<const T*>(labels.weight);
  if (labels.observed) {
    const bool* observed = labels.observed + span.begin;
    for (int64_t i = 0; i < span.size; ++i) {
      // Labels are sparse, so eight entries without a label are skipped with a single comparison.
      for (uint64_t eight = 0; i + 8 <= span.size; i += 8) {
        std::memcpy(&eight, observed + i, 8);
        if (eight) break;
      }
      if (i < span.size && observed[i]) f(i, weight ? weight[span.begin + i] : T{1});
    }
    return;
  }
  int64_t from = r * labels.per_row, to = from + labels.per_row;
  if (labels.starts) {
    const auto clamp = [&](int64_t at) { return at < 0 ? int64_t{0} : at > labels.total ? labels.total : at; };
    from = clamp(labels.starts[r]), to = clamp(labels.starts[r + 1]);
  }
  const int64_t first = batch.offsets ? span.begin : 0;
  for (int64_t j = from; j < to; ++j) {
    if (labels.listed[j] >= 0) f(labels.listed[j] - first, weight ? weight[j] : T{1});
  }
}

// A row, its labels, and nu.
template <class S>
struct LossRow {
  using T = typename Work<S>::type;
  const LabelArgs& labels;
  const Batch& batch;
  int64_t r;
  Span span;
  T high, low;

  static LossRow at(const LabelArgs& labels, const Batch& batch, const void* nu, int64_t r) {
    const T* pair = static_cast<const T*>(nu) + r;
    return {labels, batch, r, row_span(batch, r), pair[0], pair[batch.rows]};
  }

  // Returns the entry at `place`, or -inf if it is masked, or NaN if `place` is outside the row.
  T entry(int64_t place) const {
    if (place < 0 || place >= span.size) return static_cast<T>(NAN);
    if (batch.mask && !batch.mask[span.begin + place]) return -static_cast<T>(HUGE_VAL);
    return load_one(static_cast<const S*>(batch.x) + span.begin + place);
  }

  int64_t count_infinite() const {
    int64_t count = 0;
    for (int64_t i = 0; i < span.size; ++i) count += entry(i) == static_cast<T>(HUGE_VAL);
    return count;
  }

  // Visits the labels with nonzero weight. Collects labels with a finite entry and a finite nu in vectors and calls
  // f(z, c, places, count), with z = 0 and c = 0 in unused lanes. Calls otherwise(a, c) for every other label. Returns
  // whether there were any labels with nonzero weight.
  template <class F, class G>
  LML_INLINE bool vectors(const F& f, const G& otherwise) const {
    T z[lanes<T>] = {}, c[lanes<T>] = {};
    int64_t places[lanes<T>];
    int64_t count = 0;
    bool any = false;
    each_label<T>(labels, batch, r, span, [&](int64_t place, T weight) __attribute__((always_inline)) {
      if (weight == 0) return;
      any = true;
      const T a = entry(place);
      if (!(a - a == 0 && high - high == 0)) return otherwise(a, weight);
      z[count] = (a + high) + low, c[count] = weight, places[count] = place;
      if (++count == lanes<T>) {
        f(load(z), load(c), places, count);
        count = 0;
      }
    });
    if (count) {
      for (int64_t j = count; j < lanes<T>; ++j) z[j] = c[j] = 0;
      f(load(z), load(c), places, count);
    }
    return any;
  }

  // Returns -c * log(y) for a label whose entry or nu is not finite.
  double limit(T a, T c, double k) const {
    const T infinity = static_cast<T>(HUGE_VAL);
    double log_y = a > -infinity && high > 0 ? 0 : -HUGE_VAL;
    if (a == infinity) {
      const double share = high == -infinity ? k / static_cast<double>(count_infinite()) : 1;
      log_y = share < 1 ? ::log(share) : 0;
    }
    if (a != a || high != high) log_y = NAN;
    return -static_cast<double>(c) * log_y;
  }

  double loss(double k) const {
    vdouble sum{};
    double rest = 0;
    vectors(
        [&](Vec<T> z, Vec<T> c, const int64_t*, int64_t) __attribute__((always_inline)) {
          const Vec<T> log_y = keep<T>(greater(Vec<T>{}, z), z) - vlog1p(vexp(-vabs(z)));
          sum -= widen(c * log_y);
        },
        [&](T a, T c) { rest += limit(a, c, k); });
    return total(sum) + rest;
  }

  static LML_INLINE Vec<T> sigma_minus(Vec<T> z) { return Logistic<T>(z).sigma(-z); }

  // Computes dx and dk. `room` must have space for one value per entry and may be dx itself.
  void gradient(double g, double k, S* dx, double* dk, T* room, Team team) const {
    const BackwardRow<S> row{{batch, span, team}, nullptr, nullptr, dx, dk, high, low};
    vdouble sum{};
    double tied = 0, undefined = 0;
    const bool any = vectors([&](Vec<T> z, Vec<T> c, const int64_t*, int64_t)
                                 __attribute__((always_inline)) { sum += widen(c * sigma_minus(z)); },
                             [&](T a, T c) {
                               if (a == static_cast<T>(HUGE_VAL)) tied += static_cast<double>(c);
                               if (a != a) undefined = NAN;
                             });
    if (!any) return row.zero();
    if (!(high - high == 0)) {
      row.special(Gradient::dual);
      // If p > k entries are +inf, each gets y = k / p, and the derivative of log y with respect to k is 1 / k.
      if (high < 0 && tied != 0 && k > 0 && k < static_cast<double>(count_infinite())) *dk = -g * tied / k;
      return;
    }
    const double change = -g * (total(sum) + undefined);
    const T share = row.dual(change, room), minus = static_cast<T>(-g);
    vectors(
        [&](Vec<T> z, Vec<T> c, const int64_t* places, int64_t count) __attribute__((always_inline)) {
          const Vec<T> own = minus * c * sigma_minus(z);
          for (int64_t j = 0; j < count; ++j) {
            // In half precision, start from the unrounded w in `room`, so that the result is rounded only once.
            const T rest = sizeof(S) == sizeof(T) ? load_one(dx + places[j]) : -(room[places[j]] * share);
            store_one(dx + places[j], rest + own[j]);
          }
        },
        [](T, T) {});
  }
};

// Collects the labels of several rows, so that their exponentials and logarithms fill complete vectors.
template <class S>
class LabelBlock {
  using T = typename Work<S>::type;
  static constexpr int room = 256, most_per_row = 64;

 public:
  enum Kind { none, ordinary, other };

  bool has_room() const { return size_ + most_per_row <= room; }
  int size() const { return size_; }
  void clear() { size_ = 0; }

  // Adds the labels of a row if the row is ordinary: it has few labels, and nu and the entries at the labels are
  // finite.
  LML_INLINE Kind add(const LossRow<S>& row) {
    const int begin = size_;
    Kind kind = none;
    bool others = !(row.high - row.high == 0);
    each_label<T>(row.labels, row.batch, row.r, row.span, [&](int64_t place, T weight) __attribute__((always_inline)) {
      if (kind == none) kind = ordinary;
      if (weight == 0) return;
      const T a = row.entry(place);
      others |= !(a - a == 0) || size_ - begin == most_per_row;
      if (others) return;
      z_[size_] = (a + row.high) + row.low, c_[size_] = weight, place_[size_] = place;
      ++size_;
    });
    if (kind == none || !others) return kind;
    size_ = begin;
    return other;
  }

  // Computes f(z, c) for all labels.
  template <class F>
  LML_INLINE void compute(const F& f) {
    for (int j = size_; j % lanes<T>; ++j) z_[j] = c_[j] = 0;
    for (int j = 0; j < size_; j += lanes<T>) store(value_ + j, f(load(z_ + j), load(c_ + j)));
  }
  double sum(int begin, int end) const {
    double sum = 0;
    for (int j = begin; j < end; ++j) sum += static_cast<double>(value_[j]);
    return sum;
  }
  T value(int j) const { return value_[j]; }
  int64_t place(int j) const { return place_[j]; }

 private:
  int size_ = 0;
  T z_[room], c_[room], value_[room];
  int64_t place_[room];
};

template <class S>
void loss_forward_rows(const LossForwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  constexpr int most_rows = 32;
  const Batch& batch = args.solve.batch;
  forward_rows<S>(args.solve, rows);
  T* loss = static_cast<T*>(args.loss);
  LabelBlock<S> labels;
  int64_t which[most_rows];
  int begin[most_rows + 1], count = 0;
  const auto finish = [&]() {
    labels.compute([](Vec<T> z, Vec<T> c) __attribute__((always_inline)) {
      return c * (vlog1p(vexp(-vabs(z))) - keep<T>(greater(Vec<T>{}, z), z));
    });
    begin[count] = labels.size();
    for (int i = 0; i < count; ++i) loss[which[i]] = static_cast<T>(labels.sum(begin[i], begin[i + 1]));
    labels.clear();
    count = 0;
  };
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const LossRow<S> row = LossRow<S>::at(args.labels, batch, args.solve.nu, r);
    begin[count] = labels.size();
    const auto kind = labels.add(row);
    loss[batch.rows + r] = kind != LabelBlock<S>::none;
    if (kind == LabelBlock<S>::ordinary) {
      which[count++] = r;
      if (count == most_rows || !labels.has_room()) finish();
    } else {
      loss[r] = kind == LabelBlock<S>::none ? 0 : static_cast<T>(row.loss(args.solve.k[r * args.solve.k_stride]));
    }
  }
  finish();
}

template <class S>
__attribute__((noinline)) void copy_row(const S* from, S* to, int64_t n, Team team) {
  each_part(n, team, [=](int64_t begin, int64_t size) {
    // The pointers of an empty row may be null, which memcpy does not accept.
    if (size > 0) ::memcpy(to + begin, from + begin, sizeof(S) * static_cast<size_t>(size));
  });
}

// Processes several short rows at once, like `BackwardBlock`.
template <class S>
class LossBackwardBlock {
  using Short = ShortRow<S>;

 public:
  explicit LossBackwardBlock(bool in_place) : in_place_(in_place) {}
  bool is_full() const { return count_ == block_rows || !labels_.has_room(); }

  // Adds a row. Returns false, without adding the row, if it is too long or not ordinary.
  LML_INLINE bool add(const LossRow<S>& row, double g, S* dx, double* dk) {
    if (row.span.size > short_row) return false;
    begin_[count_] = labels_.size();
    if (labels_.add(row) != LabelBlock<S>::ordinary) return false;
    rows_[count_] = {{row.batch, row.span}, nullptr, nullptr, dx, dk, row.high, row.low};
    which_[count_] = row.r, g_[count_] = g;
    ++count_;
    return true;
  }

  // Computes the gradients for all added rows. Calls `otherwise(r)` for rows whose sum(w) is too small to be accurate.
  template <class F>
  __attribute__((noinline)) void finish(const F& otherwise) {
    if (count_ == 0) return;
    begin_[count_] = labels_.size();
    labels_.compute([](vfloat z, vfloat c) __attribute__((always_inline)) { return c * LossRow<S>::sigma_minus(z); });
    float* w[block_rows];
    vfloat weights[block_rows];
    const bool aside = in_place_ || sizeof(S) == 2;  // w cannot be stored in dx
    for (int i = 0; i < count_; ++i) {
      w[i] = aside ? scratch_.room(block_rows * short_row) + i * short_row : reinterpret_cast<float*>(rows_[i].dx);
      Short::exponentials(rows_[i], w[i]);
    }
    for (int i = 0; i < count_; ++i) {
      vfloat sum{};
      Short::weigh(rows_[i], w[i], [&](int64_t, int64_t, vfloat a) __attribute__((always_inline)) { sum += a; });
      weights[i] = sum;
    }
    for (int i = count_; i < block_rows; ++i) weights[i] = vfloat{};
    const vfloat sum = sums_over_lanes(weights);
    for (int i = 0; i < count_; ++i) {
      if (!(sum[i] > 1e-20f)) {
        otherwise(which_[i]);
        continue;
      }
      const double change = -g_[i] * labels_.sum(begin_[i], begin_[i + 1]),
                   share = change / static_cast<double>(sum[i]);
      *rows_[i].dk = share;
      write_row(i, w[i], static_cast<float>(share), aside);
    }
    labels_.clear();
    count_ = 0;
  }

 private:
  LML_INLINE void write_row(int i, float* w, float share, bool aside) const {
    const int64_t n = rows_[i].n;
    S* dx = rows_[i].dx;
    each_vector<float>(n, [=](int64_t at, int64_t count)
                              __attribute__((always_inline)) { write(w + at, -(read(w + at, count) * share), count); });
    const float minus = static_cast<float>(-g_[i]);
    for (int j = begin_[i]; j < begin_[i + 1]; ++j) w[labels_.place(j)] += minus * labels_.value(j);
    if (!aside) return;
    each_vector<float>(n, [=](int64_t at, int64_t count)
                              __attribute__((always_inline)) { write(dx + at, read(w + at, count), count); });
  }

  bool in_place_;
  int count_ = 0;
  int begin_[block_rows + 1];
  int64_t which_[block_rows];
  double g_[block_rows];
  BackwardRow<S> rows_[block_rows];
  LabelBlock<S> labels_;
  Scratch<float> scratch_;
};
template <>
class LossBackwardBlock<double> {
 public:
  explicit LossBackwardBlock(bool) {}
  bool is_full() const { return false; }
  bool add(const LossRow<double>&, double, double*, double*) { return false; }
  template <class F>
  void finish(const F&) {}
};

template <class S>
void loss_backward_rows(const LossBackwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> work;
  Scratch<S> beside;
  const bool in_place = args.dx == args.batch.x;  // the gradient overwrites the logits, one row at a time
  LossBackwardBlock<S> short_rows(in_place);
  const auto gradient = [&](int64_t r) {
    return static_cast<double>(static_cast<const T*>(args.grad)[r * args.grad_stride]);
  };
  const auto one_by_one = [&](int64_t r) {
    const LossRow<S> row = LossRow<S>::at(args.labels, args.batch, args.nu, r);
    const int64_t n = row.span.size;
    S* dx = part_of<S>(args.dx, row.span);
    S* out = in_place ? beside.room(n) : dx;
    T* room = work.room_in(out, n);
    row.gradient(gradient(r), args.k[r * args.k_stride], out, args.dk + r, room, rows.team);
    if (in_place) copy_row(out, dx, n, rows.team);
  };
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const LossRow<S> row = LossRow<S>::at(args.labels, args.batch, args.nu, r);
    if (!short_rows.add(row, gradient(r), part_of<S>(args.dx, row.span), args.dk + r)) one_by_one(r);
    if (short_rows.is_full()) short_rows.finish(one_by_one);
  }
  short_rows.finish(one_by_one);
}

}  // namespace
}  // namespace torchlml
