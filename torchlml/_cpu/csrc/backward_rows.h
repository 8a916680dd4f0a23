// The backward pass for all rows of a call. Short rows are processed in blocks, and longer rows one by one.
#pragma once

#include "backward.h"

namespace torchlml {
namespace {

// Building blocks for processing several short rows at once. Each phase runs over all rows before the next phase
// begins, so that the dependency chains of different rows overlap. The sums of all rows are collected in one vector, so
// that a single vector division serves the whole block.
template <class S>
struct ShortRow {
  struct Sums {
    vfloat weight{}, moment{};  // sum(w) and sum(w * g)
    // The incoming gradient of an entry with w = 0 (masked, infinite or saturated) is ignored, even if it is NaN.
    LML_INLINE void add(vfloat w, vfloat g) {
      weight += w;
      moment += w * keep<float>(greater(w, 0.0f), g);
    }
  };

  // Computes exp(-|z|), from which `weigh` computes w.
  static LML_INLINE void exponentials(const BackwardRow<S> row, float* w) {
    each_vector<float>(row.n, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      write(w + i, vexp(-vabs(row.z_at(i, count))), count);
    });
  }
  // Computes w = y * (1 - y) from these exponentials. Infinite entries yield 0 without a special case. Masked entries
  // may have any value, so their w is set to 0.
  template <class F>
  static LML_INLINE void weigh(const BackwardRow<S> row, float* w, const F& add) {
    const auto weight = [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const vfloat a = read(w + i, count), r = reciprocal(1.0f + a);
      return count < lanes<float> ? keep<float>(first_lanes<float>(count), a * r * r) : a * r * r;
    };
    if (row.mask) {
      each_vector<float>(row.n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const vfloat out = keep<float>(load_mask<float>(row.mask + i, count), weight(i, count));
        write(w + i, out, count);
        add(i, count, out);
      });
    } else {
      each_vector<float>(row.n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const vfloat out = weight(i, count);
        write(w + i, out, count);
        add(i, count, out);
      });
    }
  }
};

template <class S>
class BackwardBlock {
  using Short = ShortRow<S>;
  using Sums = typename Short::Sums;

 public:
  explicit BackwardBlock(const BackwardArgs& args) : args_(args) {}
  static constexpr bool takes(int64_t n) { return n <= short_row; }

  LML_INLINE void add(int64_t r, const Span& span) {
    rows_[count_] = r, spans_[count_] = span;
    if (++count_ == block_rows) finish();
  }

  // Computes the derivatives of the projection for all added rows (see `BackwardRow::projection`).
  __attribute__((noinline)) void finish() {
    if (count_ == 0) return;
    vfloat weights[block_rows], moments[block_rows];
    near_count_ = 0;
    if (sizeof(S) == 2) {
      for (int i = 0; i < count_; ++i) Short::exponentials(row(i), w(i));
    }
    for (int i = 0; i < count_; ++i) {
      const Sums sums = sizeof(S) == 2 ? sums_from_z(row(i), w(i)) : sums_from_y(i);  // a half-precision y was rounded
      weights[i] = sums.weight, moments[i] = sums.moment;
    }
    for (int i = count_; i < block_rows; ++i) weights[i] = moments[i] = vfloat{};
    for (int j = 0; j < near_count_; ++j) patch(row(near_[j].row), near_[j].at, w(near_[j].row));
    for (int i = 0; i < count_ && near_count_; ++i) {
      if (!has_near_[i]) continue;
      const Sums sums = sums_of_w(i);
      weights[i] = sums.weight, moments[i] = sums.moment;
    }
    const vfloat sum = sums_over_lanes(weights), mean = sums_over_lanes(moments) / sum;
    const vfloat dk = keep<float>(greater(sum, 0.0f), mean);
    for (int i = 0; i < count_; ++i) {
      args_.dk[rows_[i]] = static_cast<double>(dk[i]);
      write_row(spans_[i], w(i), mean[i]);
    }
    count_ = 0;
  }

 private:
  LML_INLINE float* w(int i) { return w_ + i * short_row; }

  LML_INLINE BackwardRow<S> row(int i) const {
    const float* nu = static_cast<const float*>(args_.nu) + rows_[i];
    return {{args_.batch, spans_[i]},
            part_of<S>(args_.grad, spans_[i]),
            part_of<S>(args_.y, spans_[i]),
            part_of<S>(args_.dx, spans_[i]),
            args_.dk + rows_[i],
            nu[0],
            nu[args_.batch.rows]};
  }

  static LML_INLINE Sums sums_from_z(const BackwardRow<S> row, float* w) {
    Sums sums;
    Short::weigh(row, w, [&](int64_t i, int64_t count, vfloat a) __attribute__((always_inline)) {
      sums.add(a, read(row.grad + i, count));
    });
    return sums;
  }

  // Computes w = y * (1 - y). If y is near 1, this w is inaccurate, and the vector is listed in `near_` for `patch`.
  LML_INLINE Sums sums_from_y(int of) {
    const Span span = spans_[of];
    const S* y = static_cast<const S*>(args_.y) + span.begin;
    const S* grad = static_cast<const S*>(args_.grad) + span.begin;
    const S* dx = static_cast<const S*>(args_.dx) + span.begin;
    float* to = w(of);
    Sums sums;
    ifloat found{};
    each_vector<float>(span.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      __builtin_prefetch(dx + i);
      const vfloat p = read(y + i, count), a = p - p * p;
      found |= BackwardRow<S>::near_one(p);
      store(to + i, a);
      sums.add(a, read(grad + i, count));
    });
    has_near_[of] = any<float>(found);
    if (has_near_[of]) {
      int listed = near_count_;
      each_vector<float>(span.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        near_[listed] = {static_cast<int16_t>(of), static_cast<int16_t>(i)};
        listed += any<float>(BackwardRow<S>::near_one(read(y + i, count)));
      });
      near_count_ = listed;
    }
    return sums;
  }

  LML_INLINE Sums sums_of_w(int of) {
    const Span span = spans_[of];
    const S* grad = static_cast<const S*>(args_.grad) + span.begin;
    const float* a = w(of);
    Sums sums;
    each_vector<float>(span.size, [&](int64_t i, int64_t count)
                                      __attribute__((always_inline)) { sums.add(load(a + i), read(grad + i, count)); });
    return sums;
  }

  // Computes w from x and nu for those entries of one vector whose y is near 1.
  static LML_INLINE void patch(const BackwardRow<S> row, int64_t i, float* w) {
    const int64_t rest = row.n - i, count = rest < lanes<float> ? rest : int64_t{lanes<float>};
    const ifloat near = row.near_one(read(row.y + i, count));
    store(w + i, select<float>(near, Logistic<float>(row.z_at(i, count)).weight(), load(w + i)));
  }

  LML_INLINE void write_row(const Span span, const float* w, float mean) const {
    const S* grad = static_cast<const S*>(args_.grad) + span.begin;
    S* dx = static_cast<S*>(args_.dx) + span.begin;
    each_vector<float>(span.size, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const vfloat a = load(w + i);
      write(dx + i, keep<float>(greater(a, 0.0f), a * (read(grad + i, count) - mean)), count);
    });
  }

  struct Place {
    int16_t row, at;
  };
  const BackwardArgs& args_;
  int count_ = 0, near_count_;
  int64_t rows_[block_rows];
  Span spans_[block_rows];
  Place near_[block_rows * (short_row / lanes<float>)+1];
  bool has_near_[block_rows];
  alignas(LML_VECTOR_BYTES) float w_[block_rows * short_row];
};
// Blocks compute in float32, so float64 rows are processed one by one.
template <>
class BackwardBlock<double> {
 public:
  explicit BackwardBlock(const BackwardArgs&) {}
  static constexpr bool takes(int64_t) { return false; }
  void add(int64_t, const Span&) {}
  void finish() {}
};

template <class S>
void backward_rows(const BackwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> work;
  BackwardBlock<S> short_rows(args);
  const bool dual = args.kind == Gradient::dual;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(args.batch, r);
    const T* nu = static_cast<const T*>(args.nu) + r;
    const T high = nu[0], low = nu[args.batch.rows];
    const bool finite = high - high == 0, free = args.bounded && high == 0 && low == 0;
    if (finite && !free && args.kind == Gradient::projection && BackwardBlock<S>::takes(span.size)) {
      short_rows.add(r, span);
      continue;
    }
    const BackwardRow<S> row{{args.batch, span, rows.team},
                             dual ? nullptr : part_of<S>(args.grad, span),
                             part_of<S>(args.y, span),
                             part_of<S>(args.dx, span),
                             args.dk + r,
                             high,
                             low};
    T* room = work.room_in(row.dx, span.size);
    if (!finite) {
      row.special(args.kind);
    } else if (free) {
      row.free_row();
    } else if (dual) {
      row.dual(static_cast<double>(static_cast<const T*>(args.grad)[r]), room);
    } else if (args.kind == Gradient::logarithm) {
      row.logarithm();
    } else {
      row.projection(room);
    }
  }
  short_rows.finish();
}

}  // namespace
}  // namespace torchlml
