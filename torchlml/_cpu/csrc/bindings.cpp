// Registers the kernels as the CPU implementations of the library's operators. Because of LibTorch's stable ABI, one
// binary works with every torch >= 2.10. It also works with every Python version, because no Python header is included.
#include <tuple>

#include "launch.h"
#include "tensors.h"

namespace torchlml {
namespace {

std::tuple<Tensor, Tensor> run_forward(const Tensor& x, const Tensor& k, const OptionalTensor& mask,
                                       const OptionalTensor& offsets, Output output, Bound bound = Bound::exactly) {
  ForwardArgs args{make_batch(x, mask, offsets), nullptr, 0, output, nullptr, nullptr, bound};
  const int64_t rows = args.batch.rows;
  args.k = read_k(k, rows, args.k_stride);
  Tensor nu = empty_nu(x, rows);
  Tensor y = nu;
  if (output != Output::none) {
    y = empty_beside(x);
    args.y = y.mutable_data_ptr();
  }
  args.nu = nu.mutable_data_ptr();
  launch_split(&Kernels::forward, x, args.batch, args);
  return {y, nu};
}

Tensor solve(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets) {
  return std::get<1>(run_forward(x, k, mask, offsets, Output::none));
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets) {
  return run_forward(x, k, mask, offsets, Output::projection);
}

std::tuple<Tensor, Tensor> log_forward(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets) {
  return run_forward(x, k, mask, offsets, Output::logarithm);
}

template <class Args>
std::tuple<Tensor, Tensor> launch_backward(Table<Args> kernel, const Tensor& x, const Tensor& grad, const Tensor& nu,
                                           Args& args, bool in_place = false) {
  const int64_t rows = args.batch.rows;
  check(nu, "nu", work_dtype(x), 2 * rows);
  Tensor dx = in_place ? x : empty_beside(x), dk = empty(&rows, 1, aoti_torch_dtype_float64());
  args.grad = grad.const_data_ptr();
  args.nu = nu.const_data_ptr();
  args.dx = dx.mutable_data_ptr();
  args.dk = static_cast<double*>(dk.mutable_data_ptr());
  launch_split(kernel, x, args.batch, args);
  return {dx, dk};
}

std::tuple<Tensor, Tensor> run_backward(const Tensor& grad, const Tensor& x, const Tensor* y, const Tensor& nu,
                                        const OptionalTensor& mask, const OptionalTensor& offsets, Gradient kind,
                                        bool bounded = false) {
  BackwardArgs args{make_batch(x, mask, offsets), kind, nullptr, nullptr, nullptr, nullptr, nullptr, bounded};
  const int64_t rows = args.batch.rows, entries = args.batch.total;
  const bool dual = kind == Gradient::dual;
  check(grad, "grad", dual ? work_dtype(x) : x.scalar_type(), dual ? rows : entries);
  if (y) {
    check(*y, "y", x.scalar_type(), entries);
    args.y = y->const_data_ptr();
  }
  return launch_backward(&Kernels::backward, x, grad, nu, args);
}

std::tuple<Tensor, Tensor> backward(Tensor grad, Tensor x, Tensor y, Tensor nu, OptionalTensor mask,
                                    OptionalTensor offsets) {
  return run_backward(grad, x, &y, nu, mask, offsets, Gradient::projection);
}

std::tuple<Tensor, Tensor> log_backward(Tensor grad, Tensor x, Tensor log_y, Tensor nu, OptionalTensor mask,
                                        OptionalTensor offsets) {
  return run_backward(grad, x, &log_y, nu, mask, offsets, Gradient::logarithm);
}

std::tuple<Tensor, Tensor> dual_backward(Tensor grad, Tensor x, Tensor nu, OptionalTensor mask,
                                         OptionalTensor offsets) {
  return run_backward(grad, x, nullptr, nu, mask, offsets, Gradient::dual);
}

// ---------------------------------------------------------------- the loss

LabelArgs make_labels(const Batch& batch, const Tensor& x, const Tensor& labels, const OptionalTensor& starts,
                      const OptionalTensor& weight) {
  LabelArgs args{};
  args.total = labels.numel();
  if (labels.scalar_type() == ScalarType::Bool) {
    check(labels, "labels", ScalarType::Bool, batch.total);
    args.observed = static_cast<const bool*>(labels.const_data_ptr());
  } else {
    check(labels, "labels", ScalarType::Long, args.total);
    args.listed = static_cast<const int64_t*>(labels.const_data_ptr());
    STD_TORCH_CHECK(starts.has_value() == (batch.offsets != nullptr),
                    "`starts` must be given if and only if `offsets` is given.");
    if (starts) {
      check(*starts, "starts", ScalarType::Long, batch.rows + 1);
      args.starts = static_cast<const int64_t*>(starts->const_data_ptr());
    } else {
      STD_TORCH_CHECK(labels.dim() == 2 && labels.size(0) == batch.rows,
                      "`labels` must be a matrix with one row for each row of `x`.");
      args.per_row = labels.size(1);
    }
  }
  if (weight) {
    check(*weight, "weight", work_dtype(x), args.total);
    args.weight = weight->const_data_ptr();
  }
  return args;
}

std::tuple<Tensor, Tensor> loss_forward(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets, Tensor labels,
                                        OptionalTensor starts, OptionalTensor weight) {
  LossForwardArgs args{{make_batch(x, mask, offsets), nullptr, 0, Output::none, nullptr, nullptr}, {}, nullptr};
  const Batch& batch = args.solve.batch;
  args.labels = make_labels(batch, x, labels, starts, weight);
  args.solve.k = read_k(k, batch.rows, args.solve.k_stride);
  Tensor nu = empty_nu(x, batch.rows), loss = empty_nu(x, batch.rows);
  args.solve.nu = nu.mutable_data_ptr();
  args.loss = loss.mutable_data_ptr();
  launch_split(&Kernels::loss_forward, x, batch, args);
  return {loss, nu};
}

std::tuple<Tensor, Tensor> run_loss_backward(const Tensor& grad, const Tensor& x, const Tensor& k, const Tensor& nu,
                                             const OptionalTensor& mask, const OptionalTensor& offsets,
                                             const Tensor& labels, const OptionalTensor& starts,
                                             const OptionalTensor& weight, bool in_place) {
  LossBackwardArgs args{};
  args.batch = make_batch(x, mask, offsets);
  const int64_t rows = args.batch.rows;
  args.labels = make_labels(args.batch, x, labels, starts, weight);
  args.k = read_k(k, rows, args.k_stride);
  args.grad_stride = grad.dim() == 0 ? 0 : 1;
  check(grad, "grad", work_dtype(x), args.grad_stride ? rows : 1);
  return launch_backward(&Kernels::loss_backward, x, grad, nu, args, in_place);
}

std::tuple<Tensor, Tensor> loss_backward(Tensor grad, Tensor x, Tensor k, Tensor nu, OptionalTensor mask,
                                         OptionalTensor offsets, Tensor labels, OptionalTensor starts,
                                         OptionalTensor weight) {
  return run_loss_backward(grad, x, k, nu, mask, offsets, labels, starts, weight, false);
}

Tensor loss_backward_in_place(Tensor grad, Tensor x, Tensor k, Tensor nu, OptionalTensor mask, OptionalTensor offsets,
                              Tensor labels, OptionalTensor starts, OptionalTensor weight) {
  return std::get<1>(run_loss_backward(grad, x, k, nu, mask, offsets, labels, starts, weight, true));
}

// ---------------------------------------------------------------- related operators

std::tuple<Tensor, Tensor> bounded_forward(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets,
                                           bool at_most) {
  return run_forward(x, k, mask, offsets, Output::projection, at_most ? Bound::at_most : Bound::at_least);
}

std::tuple<Tensor, Tensor> bounded_backward(Tensor grad, Tensor x, Tensor y, Tensor nu, OptionalTensor mask,
                                            OptionalTensor offsets) {
  return run_backward(grad, x, &y, nu, mask, offsets, Gradient::projection, true);
}

std::tuple<Tensor, Tensor> value(Tensor x, Tensor k, OptionalTensor mask, OptionalTensor offsets) {
  ForwardArgs solve{make_batch(x, mask, offsets), nullptr, 0, Output::none, nullptr, nullptr};
  const int64_t rows = solve.batch.rows;
  solve.k = read_k(k, rows, solve.k_stride);
  Tensor nu = empty_nu(x, rows), out = empty(&rows, 1, aoti_torch_dtype_float64());
  solve.nu = nu.mutable_data_ptr();
  const ValueArgs args{solve, static_cast<double*>(out.mutable_data_ptr())};
  launch(&Kernels::value, x, solve.batch, args);
  return {out, nu};
}

ConstrainedProblem constrained_problem(const Tensor& x, const Tensor& k, const Tensor& upper,
                                       const OptionalTensor& mask, const OptionalTensor& offsets, bool sparsemax) {
  ConstrainedProblem problem{make_batch(x, mask, offsets), sparsemax, nullptr, 0, nullptr, upper.dim() == 0 ? 0 : 1};
  problem.k = read_k(k, problem.batch.rows, problem.k_stride);
  check(upper, "upper", ScalarType::Double, problem.upper_stride ? problem.batch.total : 1);
  problem.upper = static_cast<const double*>(upper.const_data_ptr());
  return problem;
}

Tensor run_constrained(const Tensor& x, const ConstrainedProblem& problem, void* y) {
  const int64_t sizes[] = {2, problem.batch.rows};
  Tensor nu = empty(sizes, 2, aoti_torch_dtype_float64());
  const ConstrainedForwardArgs args{problem, y, static_cast<double*>(nu.mutable_data_ptr())};
  launch(&Kernels::constrained_forward, x, problem.batch, args);
  return nu;
}

template <bool sparsemax>
std::tuple<Tensor, Tensor> constrained_forward(Tensor x, Tensor k, Tensor upper, OptionalTensor mask,
                                               OptionalTensor offsets) {
  Tensor y = empty_beside(x);
  return {y, run_constrained(x, constrained_problem(x, k, upper, mask, offsets, sparsemax), y.mutable_data_ptr())};
}

template <bool sparsemax>
Tensor constrained_dual(Tensor x, Tensor k, Tensor upper, OptionalTensor offsets) {
  return run_constrained(x, constrained_problem(x, k, upper, std::nullopt, offsets, sparsemax), nullptr);
}

template <bool sparsemax>
std::tuple<Tensor, Tensor, Tensor> constrained_backward(Tensor grad, Tensor x, Tensor k, Tensor upper, Tensor nu,
                                                        OptionalTensor mask, OptionalTensor offsets, bool for_upper) {
  const ConstrainedProblem problem = constrained_problem(x, k, upper, mask, offsets, sparsemax);
  const int64_t rows = problem.batch.rows, entries = problem.batch.total;
  check(grad, "grad", x.scalar_type(), entries);
  check(nu, "nu", ScalarType::Double, 2 * rows);
  const int32_t wide = aoti_torch_dtype_float64();
  const int64_t none = 0;
  Tensor dx = empty_beside(x), dk = empty(&rows, 1, wide);
  const bool each = problem.upper_stride != 0;  // whether each entry has its own bound
  Tensor d_upper =
      for_upper && each ? empty(x.sizes().data(), x.dim(), wide) : empty(for_upper ? &rows : &none, 1, wide);
  const ConstrainedBackwardArgs args{problem,
                                     grad.const_data_ptr(),
                                     static_cast<const double*>(nu.const_data_ptr()),
                                     dx.mutable_data_ptr(),
                                     static_cast<double*>(dk.mutable_data_ptr()),
                                     for_upper ? static_cast<double*>(d_upper.mutable_data_ptr()) : nullptr};
  launch(&Kernels::constrained_backward, x, problem.batch, args);
  return {dx, dk, d_upper};
}

Tensor topk_mask(Tensor x, Tensor k, OptionalTensor mask) {
  TopkMaskArgs args{make_batch(x, mask, std::nullopt), nullptr, 0, nullptr};
  args.k = read_k(k, args.batch.rows, args.k_stride);
  Tensor y = empty_beside(x);
  args.y = y.mutable_data_ptr();
  launch(&Kernels::topk_mask, x, args.batch, args);
  return y;
}

Tensor systematic_sample(Tensor p, Tensor k, Tensor keys, Tensor start) {
  SystematicSampleArgs args{make_batch(p, std::nullopt, std::nullopt), nullptr, 0, nullptr, nullptr, nullptr};
  args.k = read_k(k, args.batch.rows, args.k_stride);
  check(keys, "keys", ScalarType::Byte, args.batch.total);
  check(start, "start", ScalarType::Double, args.batch.rows);
  args.keys = static_cast<const uint8_t*>(keys.const_data_ptr());
  args.start = static_cast<const double*>(start.const_data_ptr());
  Tensor y = empty_beside(p);
  args.y = y.mutable_data_ptr();
  launch(&Kernels::systematic_sample, p, args.batch, args);
  return y;
}

// ---------------------------------------------------------------- balanced_lml

// Splits the rows into at most 64 parts of equal size, with at least 64 rows each. Only the last part may be smaller.
// The split depends only on the size of the matrix.
struct Parts {
  Batch tasks;  // for `launch`: each of its rows stands for one part
  int64_t rows;
  Tensor sums;

  Parts(const Batch& batch, int64_t columns) : tasks(batch), rows((batch.rows + 63) / 64) {
    if (rows < 64) rows = 64;
    tasks.rows = (batch.rows + rows - 1) / rows;
    const int64_t sizes[] = {tasks.rows, columns};
    sums = empty(sizes, 2, aoti_torch_dtype_float64());
  }

  double* data() const { return static_cast<double*>(sums.mutable_data_ptr()); }

  // Adds the sums of all parts, in the order of the parts.
  void add_up(double* to) const {
    const int64_t columns = sums.size(1);
    for (int64_t j = 0; j < columns; ++j) to[j] = 0;
    for (int64_t i = 0; i < tasks.rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) to[j] += data()[i * columns + j];
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> balanced_forward(Tensor x, Tensor mu, Tensor k) {
  const Batch batch = make_batch(x, std::nullopt, std::nullopt);
  check(mu, "mu", ScalarType::Double, batch.width);
  const Parts parts(batch, 3 * batch.width);
  const bool wide = work_dtype(x) == ScalarType::Double;
  const int32_t dtype = wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const int64_t sizes[] = {3, batch.width};
  Tensor y = empty(x.sizes().data(), 2, dtype), inverse = empty(&batch.rows, 1, dtype),
         sums = empty(sizes, 2, aoti_torch_dtype_float64());
  BalancedForwardArgs args{batch,
                           nullptr,
                           0,
                           static_cast<const double*>(mu.const_data_ptr()),
                           parts.rows,
                           y.mutable_data_ptr(),
                           inverse.mutable_data_ptr(),
                           parts.data()};
  args.k = read_k(k, batch.rows, args.k_stride);
  launch(&Kernels::balanced_forward, x, parts.tasks, args);
  parts.add_up(static_cast<double*>(sums.mutable_data_ptr()));
  return {y, inverse, sums};
}

Tensor balanced_product(Tensor y, Tensor inverse, Tensor p) {
  const Batch batch = make_batch(y, std::nullopt, std::nullopt);
  check(inverse, "inverse", work_dtype(y), batch.rows);
  check(p, "p", ScalarType::Double, batch.width);
  const Parts parts(batch, batch.width);
  Tensor product = empty(&batch.width, 1, aoti_torch_dtype_float64());
  const BalancedProductArgs args{batch.x,
                                 inverse.const_data_ptr(),
                                 static_cast<const double*>(p.const_data_ptr()),
                                 batch.rows,
                                 batch.width,
                                 parts.rows,
                                 parts.data()};
  launch(&Kernels::balanced_product, y, parts.tasks, args);
  parts.add_up(static_cast<double*>(product.mutable_data_ptr()));
  return product;
}

}  // namespace
}  // namespace torchlml

// Defines the operators that a trained model calls, for programs without Python (AOTInductor). The Python library
// defines all other operators.
STABLE_TORCH_LIBRARY_FRAGMENT(torchlml, m) {
  m.def("solve(Tensor x, Tensor k, Tensor? mask, Tensor? offsets) -> Tensor");
  m.def("forward(Tensor x, Tensor k, Tensor? mask, Tensor? offsets) -> (Tensor, Tensor)");
  m.def("log_forward(Tensor x, Tensor k, Tensor? mask, Tensor? offsets) -> (Tensor, Tensor)");
  m.def("bounded_forward(Tensor x, Tensor k, Tensor? mask, Tensor? offsets, bool at_most) -> (Tensor, Tensor)");
  m.def(
      "constrained_softmax_forward(Tensor x, Tensor k, Tensor upper, Tensor? mask, Tensor? offsets) -> (Tensor, "
      "Tensor)");
  m.def(
      "constrained_sparsemax_forward(Tensor x, Tensor k, Tensor upper, Tensor? mask, Tensor? offsets)"
      " -> (Tensor, Tensor)");
  m.def("value(Tensor x, Tensor k, Tensor? mask, Tensor? offsets) -> (Tensor, Tensor)");
  m.def("topk_mask(Tensor x, Tensor k, Tensor? mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchlml, CPU, m) {
  m.impl("solve", TORCH_BOX(&torchlml::solve));
  m.impl("forward", TORCH_BOX(&torchlml::forward));
  m.impl("log_forward", TORCH_BOX(&torchlml::log_forward));
  m.impl("backward", TORCH_BOX(&torchlml::backward));
  m.impl("log_backward", TORCH_BOX(&torchlml::log_backward));
  m.impl("dual_backward", TORCH_BOX(&torchlml::dual_backward));
  m.impl("bounded_forward", TORCH_BOX(&torchlml::bounded_forward));
  m.impl("bounded_backward", TORCH_BOX(&torchlml::bounded_backward));
  m.impl("value", TORCH_BOX(&torchlml::value));
  m.impl("constrained_softmax_forward", TORCH_BOX(&torchlml::constrained_forward<false>));
  m.impl("constrained_sparsemax_forward", TORCH_BOX(&torchlml::constrained_forward<true>));
  m.impl("constrained_softmax_backward", TORCH_BOX(&torchlml::constrained_backward<false>));
  m.impl("constrained_sparsemax_backward", TORCH_BOX(&torchlml::constrained_backward<true>));
  m.impl("constrained_softmax_dual", TORCH_BOX(&torchlml::constrained_dual<false>));
  m.impl("constrained_sparsemax_dual", TORCH_BOX(&torchlml::constrained_dual<true>));
  m.impl("topk_mask", TORCH_BOX(&torchlml::topk_mask));
  m.impl("systematic_sample", TORCH_BOX(&torchlml::systematic_sample));
  m.impl("balanced_forward", TORCH_BOX(&torchlml::balanced_forward));
  m.impl("balanced_product", TORCH_BOX(&torchlml::balanced_product));
  m.impl("loss_forward", TORCH_BOX(&torchlml::loss_forward));
  m.impl("loss_backward", TORCH_BOX(&torchlml::loss_backward));
  m.impl("loss_backward_in_place", TORCH_BOX(&torchlml::loss_backward_in_place));
}

// Returns the instruction set in use, for loader.py.
#ifdef _WIN32
#define LML_EXPORT __declspec(dllexport)
#else
#define LML_EXPORT __attribute__((visibility("default")))
#endif
extern "C" LML_EXPORT const char* torchlml_instruction_set() { return torchlml::kernels().name; }
