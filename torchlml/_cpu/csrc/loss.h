// The LML loss of one row, -sum c log y over its labels, and its derivatives.
#pragma once

#include "backward.h"

namespace torchlml {
namespace {

// Calls f(place, c) for each label of one row, where `place` is relative to the row's first entry and c is the weight.
template <class T, class F>
LML_INLINE void each_label(const LabelArgs& labels, const Batch& batch, int64_t r, const Span& span, const F& f) {
  const T* weight = static_cast<const T*>(labels.weight);
  if (labels.observed) {
    const bool* observed = labels.observed + span.begin;
    for (int64_t i = 0; i < span.size; ++i) {
      // Labels are sparse, so eight entries without a label are skipped at the cost of one entry.
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

  // The entry at `place`, or -inf if it is masked, or NaN if `place` is outside the row.
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

  // Visits the labels with nonzero weight. Collects those with finite entry and nu in vectors and calls
  // f(z, c, places, count), with z = 0 and c = 0 in unused lanes. Calls otherwise(a, c) for each of the other labels.
  // Returns whether there were any labels with nonzero weight.
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

  // -c log y if the entry or nu is not finite.
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

  // `room` has space for one value per entry and may be dx itself.
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

template <class S>
void loss_forward_rows(const LossForwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  const Batch& batch = args.solve.batch;
  forward_rows<S>(args.solve, rows);
  T* loss = static_cast<T*>(args.loss);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const LossRow<S> row = LossRow<S>::at(args.labels, batch, args.solve.nu, r);
    bool any = false;
    each_label<T>(args.labels, batch, r, row.span, [&](int64_t, T) { any = true; });
    loss[r] = any ? static_cast<T>(row.loss(args.solve.k[r * args.solve.k_stride])) : 0;
    loss[batch.rows + r] = any;
  }
}

template <class S>
__attribute__((noinline)) void copy_row(const S* from, S* to, int64_t n, Team team) {
  each_part(n, team, [=](int64_t begin, int64_t size) {
    // The pointers of an empty row may be null, which memcpy does not accept.
    if (size > 0) ::memcpy(to + begin, from + begin, sizeof(S) * static_cast<size_t>(size));
  });
}

template <class S>
void loss_backward_rows(const LossBackwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> work;
  Scratch<S> beside;
  const bool in_place = args.dx == args.batch.x;  // the gradient replaces the logits, a whole row at a time
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const LossRow<S> row = LossRow<S>::at(args.labels, args.batch, args.nu, r);
    const int64_t n = row.span.size;
    S* dx = part_of<S>(args.dx, row.span);
    S* out = in_place ? beside.room(n) : dx;
    T* room = work.room_in(out, n);
    const double g = static_cast<double>(static_cast<const T*>(args.grad)[r * args.grad_stride]);
    row.gradient(g, args.k[r * args.k_stride], out, args.dk + r, room, rows.team);
    if (in_place) copy_row(out, dx, n, rows.team);
  }
}

}  // namespace
}  // namespace torchlml
