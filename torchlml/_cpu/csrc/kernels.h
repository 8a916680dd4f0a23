// What the bindings and the per-instruction-set kernels agree on. No torch header is needed below
// this line, so that the kernels can be compiled alone (the sanitizer driver does).
//
// How to add a kernel NAME, once torchlml defines the operator and does it in plain torch:
//   1. Here: a struct NameArgs with what it reads and writes, and a line in LML_KERNELS_TABLE.
//   2. name.h: template <class S> void NAME_rows(const NameArgs&, const Rows&), which does these rows of dtype S (see
//      rows.h for the loops). Include it in kernels.cpp.
//   3. bindings.cpp: a function with the operator's arguments, which checks them, fills in NameArgs and calls
//      launch(&Kernels::NAME, ...), or launch_split if it works on long rows in pieces (sum_of_parts in rows.h), and a
//      line in STABLE_TORCH_LIBRARY_IMPL; its schema in STABLE_TORCH_LIBRARY_FRAGMENT if trained models call it.
//   4. tools/sanitize.cpp: a call with every dtype; tests/library: that it agrees with plain torch.
// setup.py compiles every .cpp file of this folder, and kernels.cpp once for each instruction set.
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

// A row of more entries than this is long: it is worked on in pieces, on several threads where there are any. Sums are
// taken for each piece and added in the order of the pieces, so that the bits depend on the row alone.
inline constexpr int64_t long_row = 131072, piece_size = 32768;

// Calls piece(context, i) for every i < pieces, on any threads and in any order, and returns when all are done.
using Team = void (*)(int64_t pieces, void (*piece)(const void* context, int64_t i), const void* context);

// The rows [begin, end), and who helps with the long ones among them: null is nobody.
struct Rows {
  int64_t begin, end;
  Team team;
};

enum class Output { none, projection, logarithm };
enum class Bound { exactly, at_most, at_least };  // what k is to the sum

struct ForwardArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;  // 0 = one k for all rows
  Output output;
  void* y;   // null for Output::none
  void* nu;  // (2, rows): hi, then lo
  Bound bound = Bound::exactly;
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
  bool bounded = false;  // a row with nu = 0 is then free: it does not feel k
};

// The value of the projection, one number per row.
struct ValueArgs {
  ForwardArgs solve;  // with Output::none
  double* value;
};

// The projection onto {0 <= y <= upper, sum y = k}: constrained_softmax, or constrained_sparsemax.
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
  void* y;     // null when only nu is wanted
  double* nu;  // (2, rows)
};

struct ConstrainedBackwardArgs {
  ConstrainedProblem problem;
  const void* grad;
  const double* nu;
  void* dx;
  double* dk;
  double* d_upper;  // null, or like x, or one number per row where all entries have one bound
};

// Ones at the k largest entries.
struct TopkMaskArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;
  void* y;
};

// A systematic sample with the probabilities `batch.x` (dense, no mask), in the order of the keys.
struct SystematicSampleArgs {
  Batch batch;
  const double* k;
  int64_t k_stride;
  const uint8_t* keys;  // like x
  const double* start;  // of the comb, one number in [0, 1) per row
  void* y;
};

// The labels of every row: a list, or a bool for every entry of x.
struct LabelArgs {
  const int64_t* listed;  // `per_row` classes to a dense row; packed: `total` positions. Negative = none
  const int64_t* starts;  // packed: where the positions of each row begin; else null
  const bool* observed;   // instead of `listed`
  const void* weight;     // for each label, in the work dtype; null = 1
  int64_t per_row;
  int64_t total;
};

struct LossForwardArgs {
  ForwardArgs solve;
  LabelArgs labels;
  void* loss;  // (2, rows): the losses, then 1 where there is a label
};

struct LossBackwardArgs {
  Batch batch;
  LabelArgs labels;
  const void* grad;     // of each row's loss, in the work dtype
  int64_t grad_stride;  // 0 = one for all rows
  const double* k;
  int64_t k_stride;
  const void* nu;
  void* dx;  // may be x itself
  double* dk;
};

// Every kernel, and what it is given.
#define LML_KERNELS_TABLE(KERNEL)                       \
  KERNEL(forward, ForwardArgs)                          \
  KERNEL(backward, BackwardArgs)                        \
  KERNEL(loss_forward, LossForwardArgs)                 \
  KERNEL(loss_backward, LossBackwardArgs)               \
  KERNEL(value, ValueArgs)                              \
  KERNEL(constrained_forward, ConstrainedForwardArgs)   \
  KERNEL(constrained_backward, ConstrainedBackwardArgs) \
  KERNEL(topk_mask, TopkMaskArgs)                       \
  KERNEL(systematic_sample, SystematicSampleArgs)

// There is one for each dtype, in the order of enum Dtype.
template <class Args>
using Kernel = void (*)(const Args&, const Rows&);

// One of these per instruction set.
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
int processor_level();  // 4, 3, or 1 for the baseline
#endif

// careful.cpp and careful_constrained.cpp: slow, plain, double precision; for the rows that the fast paths decline. A
// threshold is nu = -center + delta.
struct Threshold {
  double center, delta;
};

// A centre near the threshold of the finite entries x (0 < k < n), by selection; reorders `x`.
template <class T>
double threshold_center(T* x, int64_t n, double k);

// nu of any finite entries, 0 < k < n; reorders `x`.
template <class T>
Threshold careful_solve(T* x, int64_t n, double k);

// The k-th largest of n entries, 1 <= k <= n; reorders `x`.
template <class T>
T kth_largest(T* x, int64_t n, int64_t k);

// nu of a projection onto {0 <= y <= upper, sum y = k} for any finite entries, 0 < k < sum of upper. `upper`
// has one bound for each entry, or `stride` 0 and one for all.
template <class T>
Threshold careful_constrained(const T* x, const T* upper, int64_t stride, int64_t n, double k, bool sparsemax);

}  // namespace torchlml
