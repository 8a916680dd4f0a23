// The backward pass of all rows of a call: short rows in blocks, and longer rows one by one.
#pragma once

#include "backward.h"

namespace torchlml {
namespace {

// Building blocks for several short rows at once. Each phase runs over all rows before the next phase begins, so that
// the dependency chains of different rows overlap. The sums over lanes and the divisions of all rows share one vector.
template <class S>
struct ShortRow {
  // Each sum is split into two partial sums, because a single chain of additions would limit the speed.
  struct Sums {
    vfloat weights[2] = {}, moments[2] = {};  // sum w and sum w g
    LML_INLINE vfloat weight() const { return weights[0] + weights[1]; }
    LML_INLINE vfloat moment() const { return moments[0] + moments[1]; }
    // The gradient of an entry with w = 0 (masked, infinite or saturated) is ignored, even if it is NaN.
    LML_INLINE void add(vfloat w, vfloat g, int into) {
      weights[into] += w;
      moments[into] += w * keep<float>(greater(w, 0.0f), g);
    }
  };

  // Calls f(i, count, into) for every vector, where `into` alternates between 0 and 1.
  template <class F>
  static LML_INLINE void each(int64_t n, const F& f) {
    constexpr int64_t size = lanes<float>;
    int64_t i = 0;
    for (; i + 2 * size <= n; i += 2 * size) f(i, size, 0), f(i + size, size, 1);
    if (i + size <= n) f(i, size, 0), i += size;
    if (i < n) f(i, n - i, 1);
  }

  // Computes exp(-|z|), from which `weigh` computes w.
  static LML_INLINE void exponentials(const BackwardRow<S> row, float* w) {
    each_vector<float>(row.n, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      write(w + i, vexp(-vabs(row.z_at(i, count))), count);
    });
  }
  // Computes w = y (1 - y) from these exponentials. Infinite entries yield 0 without a special case. A masked entry may
  // have any value.
  template <class F>
  static LML_INLINE void weigh(const BackwardRow<S> row, float* w, const F& add) {
    const auto weight = [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const vfloat a = read(w + i, count), r = reciprocal(1.0f + a);
      return count < lanes<float> ? keep<float>(first_lanes<float>(count), a * r * r) : a * r * r;
    };
    if (row.mask) {
      each(row.n, [&](int64_t i, int64_t count, int into) __attribute__((always_inline)) {
        const vfloat out = keep<float>(load_mask<float>(row.mask + i, count), weight(i, count));
        write(w + i, out, count);
        add(i, count, into, out);
      });
    } else {
      each(row.n, [&](int64_t i, int64_t count, int into) __attribute__((always_inline)) {
        const vfloat out = weight(i, count);
        write(w + i, out, count);
        add(i, count, into, out);
      });
    }
  }
};

template <class S>
class BackwardBlock {
  using Short = ShortRow<S>;
  using Sums = typename Short::Sums;
  // How w is computed: from y, from y except for the entries near 1, or from x and nu.
  enum Way { from_y, patched, from_z };

 public:
  static constexpr bool takes(int64_t n) { return n <= short_row; }

  LML_INLINE void add(const BackwardArgs& args, const Span& span, double* dk, float high, float low) {
    BackwardRow<S>& row = rows_[count_];  // written in place, because copying a new struct stalls on its stores
    row.x = part_of<S>(args.batch.x, span), row.mask = args.batch.mask ? args.batch.mask + span.begin : nullptr;
    row.n = span.size, row.team = nullptr;
    row.grad = part_of<S>(args.grad, span), row.y = part_of<S>(args.y, span), row.dx = part_of<S>(args.dx, span);
    row.dk = dk, row.high = high, row.low = low;
    if (++count_ == block_rows) finish();
  }

  // Computes the derivatives of the projection for all added rows, see `BackwardRow::projection`.
  __attribute__((noinline)) void finish() {
    if (count_ == 0) return;
    vfloat weights[block_rows], moments[block_rows];
    float* w[block_rows];
    Way way[block_rows];
    const auto take = [&](int i, const Sums& sums) { weights[i] = sums.weight(), moments[i] = sums.moment(); };
    for (int i = 0; i < count_; ++i) {
      // Store w in the output itself if it has the right type.
      w[i] = sizeof(S) == 4 ? reinterpret_cast<float*>(rows_[i].dx)
                            : scratch_.room(block_rows * short_row) + i * short_row;
      // Most rows are like the previous row, so try the same method first. This does not affect the result.
      way[i] = sizeof(S) == 2 || near_one_ ? choose(rows_[i]) : from_y;  // a half-precision y was rounded
      if (way[i] == from_y) {
        ifloat near{};
        take(i, sums_from_y(rows_[i], near));
        if (any<float>(near)) way[i] = choose(rows_[i]);
      }
      near_one_ = way[i] != from_y;
      if (way[i] == from_z) Short::exponentials(rows_[i], w[i]);
    }
    for (int i = 0; i < count_; ++i) {
      if (way[i] == from_z) take(i, sums_from_z(rows_[i], w[i]));
      if (way[i] == patched) take(i, patched_sums(rows_[i], w[i]));
    }
    for (int i = count_; i < block_rows; ++i) weights[i] = moments[i] = vfloat{};
    const vfloat sum = sums_over_lanes(weights), mean = sums_over_lanes(moments) / sum;
    const vfloat dk = keep<float>(greater(sum, 0.0f), mean);
    for (int i = 0; i < count_; ++i) {
      *rows_[i].dk = static_cast<double>(dk[i]);
      if (way[i] == from_y) {
        write_from_y(rows_[i], mean[i]);
      } else {
        rows_[i].part(0, rows_[i].n).write_projection(w[i], mean[i]);
      }
    }
    count_ = 0;
  }

 private:
  // Makes the same choice as `BackwardRow::projection`.
  static LML_INLINE Way choose(const BackwardRow<S> row) {
    if (sizeof(S) == 2) return from_z;
    ifloat near{};
    each_vector<float>(row.n, [&](int64_t i, int64_t count)
                                  __attribute__((always_inline)) { near += row.near_one(read(row.y + i, count)); });
    if (!any<float>(near)) return from_y;
    return -total_lanes(near) * 64 > row.n ? from_z : patched;
  }

  static LML_INLINE Sums sums_from_z(const BackwardRow<S> row, float* w) {
    Sums sums;
    Short::weigh(row, w, [&](int64_t i, int64_t count, int into, vfloat a) __attribute__((always_inline)) {
      sums.add(a, read(row.grad + i, count), into);
    });
    return sums;
  }

  // The sums are correct unless there are entries near 1, which are marked in `near`.
  static LML_INLINE Sums sums_from_y(const BackwardRow<S> row, ifloat& near) {
    Sums sums;
    Short::each(row.n, [&](int64_t i, int64_t count, int into) __attribute__((always_inline)) {
      const vfloat p = read(row.y + i, count);
      near |= row.near_one(p);
      sums.add(p - p * p, read(row.grad + i, count), into);
    });
    return sums;
  }

  static LML_INLINE Sums patched_sums(const BackwardRow<S> row, float* w) {
    typename BackwardRow<S>::Sums all;
    row.block_from_y(w, 0, row.n, all);
    row.patch(w, 0, row.n, all);
    Sums sums;
    sums.weights[0] = all.weights.block, sums.moments[0] = all.moments.block;
    return sums;
  }

  static LML_INLINE void write_from_y(const BackwardRow<S> row, float mean) {
    each_vector<float>(row.n, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const vfloat p = read(row.y + i, count), w = p - p * p;
      write(row.dx + i, keep<float>(greater(w, 0.0f), w * (read(row.grad + i, count) - mean)), count);
    });
  }

  int count_ = 0;
  bool near_one_ = false;  // whether the last row had entries near 1
  BackwardRow<S> rows_[block_rows];
  Scratch<float> scratch_;
};
// Blocks are only for float32 computation. Rows of float64 are processed one by one.
template <>
class BackwardBlock<double> {
 public:
  static constexpr bool takes(int64_t) { return false; }
  void add(const BackwardArgs&, const Span&, double*, double, double) {}
  void finish() {}
};

template <class S>
void backward_rows(const BackwardArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  Scratch<T> work;
  BackwardBlock<S> short_rows;
  const bool dual = args.kind == Gradient::dual;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const Span span = row_span(args.batch, r);
    const T* nu = static_cast<const T*>(args.nu) + r;
    const T high = nu[0], low = nu[args.batch.rows];
    const bool finite = high - high == 0, free = args.bounded && high == 0 && low == 0;
    if (finite && !free && args.kind == Gradient::projection && BackwardBlock<S>::takes(span.size)) {
      short_rows.add(args, span, args.dk + r, high, low);
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
