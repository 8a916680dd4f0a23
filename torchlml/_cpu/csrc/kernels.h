// The interface between the bindings and the kernels for each instruction set. It includes no torch header, so that
// the kernels can be compiled without torch (the sanitizer driver does this).
//
// To add a kernel NAME for an operator that torchlml already defines and implements in pure PyTorch:
//   1. Here: add a struct NameArgs with the inputs and outputs, and a line in LML_KERNELS_TABLE.
//   2. name.h: write template <class S> void NAME_rows(const NameArgs&, const Rows&), which processes the given rows
//      of dtype S (see rows.h for the loops). Include it in kernels.cpp.
//   3. bindings.cpp: write a function with the operator's arguments that checks them, fills in NameArgs and calls
//      launch(&Kernels::NAME, ...), or launch_split if it splits long rows into pieces (sum_of_parts in rows.h). Add a
//      line to STABLE_TORCH_LIBRARY_IMPL, and the schema to STABLE_TORCH_LIBRARY_FRAGMENT if trained models call it.
//   4. tools/sanitize.cpp: call it with every dtype. tests/library: test that it agrees with pure PyTorch.
// setup.py compiles every .cpp file in this directory, and kernels.cpp once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchlml {

enum class Dtype : int { float32, float64, bfloat16, float16 };
inline constexpr int dtype_count = 4;

// A batch of rows. In a dense batch, `offsets` is null and every row has `width` entries. In a jagged batch, `offsets`
// has rows + 1 numbers that divide the `total` entries into rows.
struct Batch {
  const void* x;
  const bool* mask;        // true = available; null = all entries are available
  const int64_t* offsets;  // null = dense
  int64_t rows;
  int64_t width;
  int64_t total;
};

struct Span {
  int64_t begin, size;
};

// The Python caller checks the offsets. Clamping them here keeps even an invalid offset in bounds.
static inline Span row_span(const Batch& b, int64_t row) {
  if (!b.offsets) return {row * b.width, b.width};
  const auto clamp = [&](int64_t at) { return at < 0 ? int64_t{0} : at > b.total ? b.total : at; };
  const int64_t begin = clamp(b.offsets[row]), end = clamp(b.offsets[row + 1]);
  return {begin, end > begin ? end - begin : 0};
}

// A row with more than `long_row` entries is long: it is split into pieces, which may run on several threads. Each
// piece has its own sums, which are added in the order of the pieces, so the result depends only on the row.
inline constexpr int64_t long_row = 131072, piece_size = 32768;

// Calls piece(context, i) for every i < pieces, on any threads and in any order, and returns when all are done.
using Team = void (*)(int64_t pieces, void (*piece)(const void* context, int64_t i), const void* context);

// The rows [begin, end), and the team that processes the pieces of long rows (null = only the calling thread).
struct Rows {
  int64_t begin, end;
  Team team;
};

enum class Output { none, projection, logarithm };
enum class Bound { exactly, at_most, at_least };  // how k constrains the sum

struct ForwardArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;  // 0 = one k for all rows
  Output output;
  void* y;   // null for Output::none
  void* nu;  // (2, rows): the high parts, then the low parts
  Bound bound = Bound::exactly;
};

enum class Gradient { projection, logarithm, dual };

struct BackwardArgs {
  Batch batch;
  Gradient kind;
  const void* grad;  // shape and dtype of x; for Gradient::dual, one value per row in the work dtype
  const void* y;     // output of the forward pass; null for Gradient::dual
  const void* nu;
  void* dx;
  double* dk;
  bool bounded = false;  // if true, a row with nu = 0 is free: k does not constrain it
};

// The optimal value of the projection problem for each row.
struct ValueArgs {
  ForwardArgs solve;  // with Output::none
  double* value;
};

// The projection onto {0 <= y <= upper, sum(y) = k}, as in constrained_softmax or constrained_sparsemax.
struct ConstrainedProblem {
  Batch batch;
  bool sparsemax;
  const double* k;
  int64_t k_stride;  // 0 = one k for all rows
  const double* upper;
  int64_t upper_stride;  // 0 = one bound for all entries
};

struct ConstrainedForwardArgs {
  ConstrainedProblem problem;
  void* y;     // null if only nu is needed
  double* nu;  // (2, rows)
};

struct ConstrainedBackwardArgs {
  ConstrainedProblem problem;
  const void* grad;
  const double* nu;
  void* dx;
  double* dk;
  double* d_upper;  // null, or the shape of x, or one value per row if all entries share a bound
};

// A mask with ones at the k largest entries and zeros elsewhere.
struct TopkMaskArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;
  void* y;
};

// A systematic sample with the probabilities `batch.x` (dense, no mask). The keys define the order of the entries.
struct SystematicSampleArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;
  const uint8_t* keys;  // one value per entry of x
  const double* start;  // offset of the sampling grid, one value in [0, 1) per row
  void* y;
};

// The labels of every row: a list of labels, or a bool for every entry of x.
struct LabelArgs {
  const int64_t* listed;  // dense: `per_row` classes for each row; jagged: `total` positions. Negative = padding
  const int64_t* starts;  // jagged: index of the first position of each row; dense: null
  const bool* observed;   // if not null, used instead of `listed`
  const void* weight;     // the weight of each label, in the work dtype; null = all weights are 1
  int64_t per_row;
  int64_t total;
};

struct LossForwardArgs {
  ForwardArgs solve;
  LabelArgs labels;
  void* loss;  // (2, rows): the losses, then 1 for each row with a label and 0 for the others
};

struct LossBackwardArgs {
  Batch batch;
  LabelArgs labels;
  const void* grad;     // gradient of each row's loss, in the work dtype
  int64_t grad_stride;  // 0 = one gradient for all rows
  const double* k;
  int64_t k_stride;
  const void* nu;
  void* dx;  // may be x itself
  double* dk;
};

// The rows of balanced_lml for given column multipliers mu. Each task processes one part of `part_rows` rows.
struct BalancedForwardArgs {
  Batch batch;  // dense, no mask
  const double* k;
  int64_t k_stride;  // 0 = one k for all rows
  const double* mu;
  int64_t part_rows;
  void* y;        // in the work dtype
  void* inverse;  // 1 / (row sum of w), where w = y * (1 - y), or 0 if the sum is 0; in the work dtype
  double* sums;   // (parts, 3, width): column sums of y, w and w * y
};

// The product W^T * diag(inverse) * W * p for one vector p, where W is the matrix of w = y * (1 - y). The rows are
// divided into parts as in BalancedForwardArgs.
struct BalancedProductArgs {
  const void* y;
  const void* inverse;  // in the work dtype
  const double* p;
  int64_t rows;
  int64_t width;
  int64_t part_rows;
  double* sums;  // (parts, width)
};

// Every kernel and its arguments.
#define LML_KERNELS_TABLE(KERNEL)                       \
  KERNEL(forward, ForwardArgs)                          \
  KERNEL(backward, BackwardArgs)                        \
  KERNEL(loss_forward, LossForwardArgs)                 \
  KERNEL(loss_backward, LossBackwardArgs)               \
  KERNEL(value, ValueArgs)                              \
  KERNEL(constrained_forward, ConstrainedForwardArgs)   \
  KERNEL(constrained_backward, ConstrainedBackwardArgs) \
  KERNEL(topk_mask, TopkMaskArgs)                       \
  KERNEL(systematic_sample, SystematicSampleArgs)       \
  KERNEL(balanced_forward, BalancedForwardArgs)         \
  KERNEL(balanced_product, BalancedProductArgs)

// A kernel has one function per dtype, in the order of enum Dtype.
template <class Args>
using Kernel = void (*)(const Args&, const Rows&);

// The kernels for one instruction set.
struct Kernels {
  const char* name;
#define LML_DECLARE(kernel, Args) Kernel<Args> kernel[dtype_count];
  LML_KERNELS_TABLE(LML_DECLARE)
#undef LML_DECLARE
};

extern const Kernels kernels_baseline;
#ifdef TORCHLML_X86_LEVELS
extern const Kernels kernels_v3;
extern const Kernels kernels_v4;
int processor_level();  // the x86-64 level that the processor supports: 4, 3, or 1 for the baseline
#endif

// careful.cpp and careful_constrained.cpp contain slow but simple double-precision solvers for rows that the fast
// solvers cannot certify. A `Threshold` represents nu = -center + delta.
struct Threshold {
  double center, delta;
};

// Returns a center near the threshold, found by selecting the entries next to it. All n entries must be finite, and k
// must be in (0, n). Reorders `x`.
template <class T>
double threshold_center(T* x, int64_t n, double k);

// Computes nu for finite entries and 0 < k < n. Reorders `x`.
template <class T>
Threshold careful_solve(T* x, int64_t n, double k);

// Returns the k-th largest of n entries, where 1 <= k <= n. Reorders `x`.
template <class T>
T kth_largest(T* x, int64_t n, int64_t k);

// Computes nu for a projection onto {0 <= y <= upper, sum(y) = k}, for finite entries and 0 < k < sum(upper). `upper`
// has one bound for each entry, or a single bound if `stride` is 0.
template <class T>
Threshold careful_constrained(const T* x, const T* upper, int64_t stride, int64_t n, double k, bool sparsemax);

}  // namespace torchlml
