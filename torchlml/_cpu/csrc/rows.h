// Loops over the vectors of a row, and scratch memory.
#pragma once

#include <stdlib.h>

#include <new>

#include "kernels.h"
#include "memory.h"

namespace torchlml {
namespace {

// Scratch memory for one row, reused for all rows of a call.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::free(data_); }
  T* room(int64_t n) {
    if (n > size_) {
      ::free(data_);
      data_ = static_cast<T*>(::malloc(sizeof(T) * static_cast<size_t>(n)));
      size_ = data_ ? n : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }
  // Returns memory for one value per entry: the output itself if it is not null and its entries have the same size,
  // otherwise scratch memory.
  template <class S>
  T* room_in(S* output, int64_t n) {
    if constexpr (sizeof(S) == sizeof(T)) {
      if (output) return reinterpret_cast<T*>(output);
    }
    return room(n);
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// One row: its entries, and which of them are available (all of them if the mask is null).
template <class S>
struct Row {
  using T = typename Work<S>::type;
  const S* x;
  const bool* mask;
  int64_t n;
  Team team;

  Row() = default;
  Row(const Batch& batch, const Span& span, Team helpers = nullptr)
      : x(static_cast<const S*>(batch.x) + span.begin),
        mask(batch.mask ? batch.mask + span.begin : nullptr),
        n(span.size),
        team(helpers) {}
  bool available(int64_t i) const { return !mask || mask[i]; }
};

// Returns a pointer to the entries of a row in a tensor, or null if the tensor is null.
template <class S>
S* part_of(void* output, const Span& span) {
  return output ? static_cast<S*>(output) + span.begin : nullptr;
}
template <class S>
const S* part_of(const void* input, const Span& span) {
  return input ? static_cast<const S*>(input) + span.begin : nullptr;
}

// Calls f(i, count) for every vector of a row. Only the last vector may have count < lanes.
template <class T, class F>
LML_INLINE void each_vector(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + lanes<T> <= n; i += lanes<T>) f(i, int64_t{lanes<T>});
  if (i < n) f(i, n - i);
}

// Calls f(start, size) for every block of `vectors` vectors.
template <class T, int64_t vectors, class F>
LML_INLINE void each_block(int64_t n, const F& f) {
  const int64_t block = vectors * lanes<T>;
  for (int64_t start = 0; start < n; start += block) f(start, n - start < block ? n - start : block);
}

// Calls `f` for every vector, and `flush` after every block of vectors.
template <class T, int64_t vectors, class F, class G>
LML_INLINE void each_vector_in_blocks(int64_t n, const F& f, const G& flush) {
  each_block<T, vectors>(n, [&](int64_t start, int64_t size) __attribute__((always_inline)) {
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) { f(start + i, count); });
    flush();
  });
}

// Calls f(i, begin, size) for every piece of a long row.
template <class F>
__attribute__((noinline)) void each_piece(int64_t n, Team team, const F& f) {
  struct Context {
    const F& f;
    int64_t n;
  } context{f, n};
  const auto piece = [](const void* given, int64_t i) {
    const Context& at = *static_cast<const Context*>(given);
    const int64_t begin = i * piece_size, rest = at.n - begin;
    at.f(i, begin, rest < piece_size ? rest : piece_size);
  };
  const int64_t pieces = (n + piece_size - 1) / piece_size;
  if (team) return team(pieces, piece, &context);
  for (int64_t i = 0; i < pieces; ++i) piece(&context, i);
}

// The functions below take a short path for rows of up to `long_row` entries and a long path for longer rows. The long
// path gets a copy of f, and f should capture by value. Otherwise, the captured variables would escape, and the
// compiler would reload them after each store even on the short path.

// Calls f(begin, size) once for the whole row, or for every piece of a long row.
template <class F>
LML_INLINE void each_part(int64_t n, Team team, const F& f) {
  if (n <= long_row) return f(0, n);
  each_piece(n, team, [f](int64_t, int64_t begin, int64_t size) { f(begin, size); });
}

// Calls f(i, count) for every vector of a row.
template <class T, class F>
LML_INLINE void each_vector(int64_t n, Team team, const F& f) {
  if (n <= long_row) return each_vector<T>(n, f);
  each_piece(n, team, [f](int64_t, int64_t begin, int64_t size) {
    const F copy = f;
    each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) { copy(begin + i, count); });
  });
}

// The sums of one pass over a row or over a piece of it.
struct Totals {
  double part[5];
  int64_t above;
};

// Returns the compensated sum of f(begin, size) over the pieces of a long row.
template <class F>
__attribute__((noinline)) Totals sum_of_pieces(int64_t n, Team team, const F f) {
  Scratch<Totals> scratch;
  Totals* parts = scratch.room((n + piece_size - 1) / piece_size);
  each_piece(n, team, [&](int64_t i, int64_t begin, int64_t size) {
    const F copy = f;
    parts[i] = copy(begin, size);
  });
  Totals sum = parts[0];
  double carry[5] = {};
  for (int64_t i = 1; i * piece_size < n; ++i) {
    for (int j = 0; j < 5; ++j) {
      const double a = parts[i].part[j] - carry[j], next = sum.part[j] + a;
      carry[j] = (next - sum.part[j]) - a;
      sum.part[j] = next;
    }
    sum.above += parts[i].above;
  }
  return sum;
}
// Returns f(0, n), or `sum_of_pieces` for a long row.
template <class F>
LML_INLINE Totals sum_of_parts(int64_t n, Team team, const F& f) {
  return n <= long_row ? f(0, n) : sum_of_pieces(n, team, f);
}

template <class S>
LML_INLINE Vec<typename Work<S>::type> read(const S* p, int64_t count) {
  return count == lanes<typename Work<S>::type> ? load(p) : load_part(p, count);
}
template <class S, class V>
LML_INLINE void write(S* p, V a, int64_t count) {
  if (count == lanes<typename Work<S>::type>) {
    store(p, a);
  } else {
    store_part(p, a, count);
  }
}

}  // namespace
}  // namespace torchlml
