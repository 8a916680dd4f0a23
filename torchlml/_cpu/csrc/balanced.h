// The kernels of balanced_lml. `balanced_forward` solves the rows for given column multipliers. `balanced_product`
// multiplies a vector by W^T * diag(inverse) * W, the expensive term of the Schur complement. Each task processes one
// part of the rows and computes column sums for it. The bindings add these sums in the order of the parts, so that
// results do not depend on the number of threads.
#pragma once

#include "forward.h"

namespace torchlml {
namespace {

// Returns the length of an array with one number per column, rounded up to a multiple of the vector length.
inline int64_t padded(int64_t n) { return (n + lanes<float> - 1) / lanes<float> * lanes<float>; }

template <class T>
void add_to(double* sums, T* some, int64_t n) {
  for (int64_t j = 0; j < n; ++j) sums[j] += static_cast<double>(some[j]), some[j] = 0;
}

template <class T>
LML_INLINE T sum_of_lanes(Vec<T> a) {
  T part[lanes<T>];
  store(part, a);
  for (int half = lanes<T> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

// Adds `count` rows of y, of w = y * (1 - y) and of w * y to the column sums in `some`, and writes the inverses of the
// row sums of w.
template <int count, class T>
LML_INLINE void add_weights(const T* y, int64_t n, T* inverse, T* some) {
  const int64_t stride = padded(n);
  Vec<T> a[count] = {};
  each_vector<T>(n, [&](int64_t j, int64_t size) __attribute__((always_inline)) {
    Vec<T> first{}, second{}, third{};
    for (int i = 0; i < count; ++i) {
      const Vec<T> v = read(y + i * n + j, size), w = v - v * v;
      a[i] += w, first += v, second += w, third += w * v;
    }
    store(some + j, load(some + j) + first);
    store(some + stride + j, load(some + stride + j) + second);
    store(some + 2 * stride + j, load(some + 2 * stride + j) + third);
  });
  for (int i = 0; i < count; ++i) {
    const T sum = sum_of_lanes<T>(a[i]);
    inverse[i] = sum > 0 ? 1 / sum : 0;
  }
}

// Calls f(first, last) for every block of rows in a part. A block is small enough for the cache and for accurate sums
// in float32.
template <class F>
void each_row_block(int64_t part, int64_t part_rows, int64_t rows, int64_t width, const F& f) {
  const int64_t most = 4096 / (width + 1) + 1, block = most < 16 ? 16 : most > 64 ? 64 : most / 16 * 16;
  const int64_t begin = part * part_rows, end = rows - begin < part_rows ? rows : begin + part_rows;
  for (int64_t first = begin; first < end; first += block) f(first, end - first < block ? end : first + block);
}

// Calls f(r, count) for groups of four rows, and then for each remaining row. `count`, the number of rows, is a
// compile-time constant.
template <class F>
LML_INLINE void in_fours(int64_t first, int64_t last, const F& f) {
  int64_t r = first;
  for (; r + 4 <= last; r += 4) f(r, std::integral_constant<int, 4>{});
  for (; r < last; ++r) f(r, std::integral_constant<int, 1>{});
}

template <class S>
void balanced_forward_rows(const BalancedForwardArgs& args, const Rows& parts) {
  using T = typename Work<S>::type;
  const int64_t n = args.batch.width, rows = args.batch.rows, stride = padded(n);
  Scratch<T> shift_room, shifted_room, nu_room, some_room;
  T* shift = shift_room.room(n + 1);
  T* some = some_room.room(3 * stride + 1);
  for (int64_t j = 0; j < n; ++j) shift[j] = static_cast<T>(args.mu[j]);
  for (int64_t j = 0; j < 3 * stride; ++j) some[j] = 0;
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    double* sums = args.sums + part * 3 * n;
    for (int64_t j = 0; j < 3 * n; ++j) sums[j] = 0;
    each_row_block(part, args.part_rows, rows, n, [&](int64_t first, int64_t last) {
      const int64_t count = last - first;
      const S* x = static_cast<const S*>(args.batch.x) + first * n;
      T* y = static_cast<T*>(args.y) + first * n;
      T* inverse = static_cast<T*>(args.inverse) + first;
      T* shifted = shifted_room.room(count * n + 1);
      for (int64_t i = 0; i < count; ++i) {
        each_vector<T>(n, [&](int64_t j, int64_t size) __attribute__((always_inline)) {
          write(shifted + i * n + j, read(x + i * n + j, size) + read(shift + j, size), size);
        });
      }
      const Batch batch{shifted, nullptr, nullptr, count, n, count * n};
      forward_rows<T>({batch, args.k + first * args.k_stride, args.k_stride, Output::projection, y,
                       nu_room.room(2 * count), Bound::exactly},
                      {0, count, nullptr});
      in_fours(first, last, [&](int64_t r, auto number) __attribute__((always_inline)) {
        add_weights<number>(y + (r - first) * n, n, inverse + (r - first), some);
      });
      for (int i = 0; i < 3; ++i) add_to(sums + i * n, some + i * stride, n);
    });
  }
}

// Adds the product W^T * diag(inverse) * W * p to the column sums in `some`, where W contains `count` rows of w.
template <int count, class S, class T>
LML_INLINE void add_product(const S* y, int64_t n, const T* inverse, const T* p, T* some) {
  Vec<T> dot[count] = {};
  each_vector<T>(n, [&](int64_t j, int64_t size) __attribute__((always_inline)) {
    const Vec<T> q = load(p + j);
    for (int i = 0; i < count; ++i) {
      const Vec<T> v = read(y + i * n + j, size);
      dot[i] += (v - v * v) * q;
    }
  });
  T t[count];
  for (int i = 0; i < count; ++i) t[i] = inverse[i] * sum_of_lanes<T>(dot[i]);
  each_vector<T>(n, [&](int64_t j, int64_t size) __attribute__((always_inline)) {
    Vec<T> sum = load(some + j);
    for (int i = 0; i < count; ++i) {
      const Vec<T> v = read(y + i * n + j, size);
      sum += (v - v * v) * t[i];
    }
    store(some + j, sum);
  });
}

template <class S>
void balanced_product_rows(const BalancedProductArgs& args, const Rows& parts) {
  using T = typename Work<S>::type;
  const int64_t n = args.width, stride = padded(n);
  Scratch<T> p_room, some_room;
  T* p = p_room.room(stride + 1);
  T* some = some_room.room(stride + 1);
  for (int64_t j = 0; j < stride; ++j) p[j] = j < n ? static_cast<T>(args.p[j]) : 0, some[j] = 0;
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    double* sums = args.sums + part * n;
    for (int64_t j = 0; j < n; ++j) sums[j] = 0;
    each_row_block(part, args.part_rows, args.rows, n, [&](int64_t first, int64_t last) {
      in_fours(first, last, [&](int64_t r, auto number) __attribute__((always_inline)) {
        add_product<number>(static_cast<const S*>(args.y) + r * n, n, static_cast<const T*>(args.inverse) + r, p, some);
      });
      add_to(sums, some, n);
    });
  }
}

}  // namespace
}  // namespace torchlml
