// What the bindings and the per-instruction-set kernels agree on. No torch header is needed below
// this line, so that the kernels can be compiled alone (the sanitizer driver does).
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchlml {

enum class Dtype : int { float32, float64, bfloat16, float16 };
inline constexpr int dtype_count = 4;

// A batch of rows: dense (`offsets` null, every row has `width` entries) or packed (`offsets` has
// rows + 1 entries into `total` entries).
struct Batch {
  const void* x;
  const bool* mask;        // true = available; null = everything is
  const int64_t* offsets;  // null = dense
  int64_t rows;
  int64_t width;
  int64_t total;
};

struct Span {
  int64_t begin, size;
};

// Offsets are checked by the caller in Python; clamping them here keeps even a bad one in bounds.
static inline Span row_span(const Batch& b, int64_t row) {
  if (!b.offsets) return {row * b.width, b.width};
  const auto clamp = [&](int64_t at) { return at < 0 ? int64_t{0} : at > b.total ? b.total : at; };
  const int64_t begin = clamp(b.offsets[row]), end = clamp(b.offsets[row + 1]);
  return {begin, end > begin ? end - begin : 0};
}

enum class Output { none, projection, logarithm };

struct ForwardArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;  // 0 = one k for all rows
  Output output;
  void* y;   // null for Output::none
  void* nu;  // (2, rows): hi, then lo
};

enum class Gradient { projection, logarithm, dual };

struct BackwardArgs {
  Batch batch;
  Gradient kind;
  const void* grad;  // like x; for Gradient::dual one number per row in the work dtype
  const void* y;     // the forward's output; null for Gradient::dual
  const void* nu;
  void* dx;
  double* dk;
};

// One of these per instruction set; every function handles the rows [begin, end).
struct Kernels {
  const char* name;
  void (*forward[dtype_count])(const ForwardArgs&, int64_t begin, int64_t end);
  void (*backward[dtype_count])(const BackwardArgs&, int64_t begin, int64_t end);
};

extern const Kernels kernels_baseline;
#ifdef TORCHLML_X86_LEVELS
extern const Kernels kernels_v3;
extern const Kernels kernels_v4;
#endif

// careful.cpp: slow, plain, double precision; for the rows the fast path declines. A threshold is
// nu = -center + delta.
struct Threshold {
  double center, delta;
};

// A centre near the threshold of the finite entries x (0 < k < n), by selection; reorders `x`.
template <class T>
double threshold_center(T* x, int64_t n, double k);

// nu of any finite entries, 0 < k < n; reorders `x`.
template <class T>
Threshold careful_solve(T* x, int64_t n, double k);

}  // namespace torchlml
