// Runs the kernels on special rows and unusual shapes. sanitize.py compiles this program with AddressSanitizer and
// UndefinedBehaviorSanitizer. Every buffer is a separate heap block of the exact size, so that any out-of-bounds access
// is detected.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../torchlml/_cpu/csrc/kernels.h"

using namespace torchlml;

namespace {

std::mt19937_64 engine(1);
int failures = 0;
long calls = 0;

double uniform() { return std::uniform_real_distribution<double>()(engine); }

// Allocates a heap block of exactly `bytes` bytes, filled with 0xff, which is NaN in every dtype.
std::unique_ptr<char[]> block(size_t bytes) {
  std::unique_ptr<char[]> memory(new char[bytes]);
  std::memset(memory.get(), 0xff, bytes);
  return memory;
}

size_t size_of(int dtype) { return dtype == 1 ? 8 : dtype == 0 ? 4 : 2; }

uint16_t to_bfloat16(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, 4);
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t to_float16(float a) {  // accurate enough for test values: truncates, and flushes subnormals to zero
  uint32_t bits;
  std::memcpy(&bits, &a, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  if (a != a) return static_cast<uint16_t>(sign | 0x7e00);
  if (std::fabs(a) > 65504) return static_cast<uint16_t>(sign | 0x7c00);
  if (std::fabs(a) < 6.2e-5f) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | (((bits & 0x7fffffff) >> 13) - (112 << 10)));
}

void put(void* memory, int64_t i, int dtype, double a) {
  const bool too_large = std::fabs(a) > 3.4e38 && std::isfinite(a);
  const float narrow = too_large ? (a > 0 ? 3.4e38f : -3.4e38f) : static_cast<float>(a);
  if (dtype == 0) static_cast<float*>(memory)[i] = narrow;
  if (dtype == 1) static_cast<double*>(memory)[i] = a;
  if (dtype == 2) static_cast<uint16_t*>(memory)[i] = to_bfloat16(narrow);
  if (dtype == 3) static_cast<uint16_t*>(memory)[i] = to_float16(narrow);
}

// Returns all rows, with a team that processes the pieces of long rows in reverse order.
Rows all(int64_t rows) {
  return {0, rows, [](int64_t pieces, void (*piece)(const void*, int64_t), const void* context) {
            for (int64_t i = pieces; i-- > 0;) piece(context, i);
          }};
}

double value(int style) {
  std::normal_distribution<double> normal;
  const double specials[] = {NAN, INFINITY, -INFINITY, 3.4e38, -3.4e38, 1e-45, 0.0, -0.0, 1e4, -1e9, 1.0};
  switch (style) {
    case 0: return normal(engine);
    case 1: return 12 * normal(engine);
    case 2: return std::floor(3 * uniform());
    case 3: return uniform() < 0.1 ? specials[engine() % 11] : normal(engine);
    case 4: return specials[1 + engine() % 10];
    case 5: return 1e7 + normal(engine);
    default: return std::pow(10.0, 40 * uniform() - 1) * (uniform() < 0.5 ? -1 : 1);
  }
}

// Runs the related operators (constrained projections, top-k mask and others) on the caller's rows.
void run_family(const Kernels& kernels, int dtype, const Batch& batch, const double* k, const void* g, const void* nu,
                void* y, void* dx, double* dk, size_t entries) {
  const auto rows = static_cast<size_t>(batch.rows);
  auto upper = block(8 * entries), d_upper = block(8 * (entries > rows ? entries : rows)), pair = block(16 * rows);
  auto wide = [](const std::unique_ptr<char[]>& memory) { return reinterpret_cast<double*>(memory.get()); };
  for (size_t i = 0; i < entries; ++i) {
    wide(upper)[i] = uniform() < 0.1 ? 0.0 : uniform() < 0.1 ? INFINITY : 2 * uniform();
  }
  const double one = 1;
  for (const Bound bound : {Bound::at_most, Bound::at_least}) {
    kernels.forward[dtype](ForwardArgs{batch, k, 1, Output::projection, y, const_cast<void*>(nu), bound},
                           all(batch.rows));
    kernels.backward[dtype](BackwardArgs{batch, Gradient::projection, g, y, nu, dx, dk, true}, all(batch.rows));
  }
  kernels.value[dtype](ValueArgs{ForwardArgs{batch, k, 1, Output::none, nullptr, const_cast<void*>(nu)}, dk},
                       all(batch.rows));
  for (int form = 0; form < 4; ++form) {
    const ConstrainedProblem problem{batch, (form & 1) != 0, k, 1, form & 2 ? wide(upper) : &one, form & 2 ? 1 : 0};
    kernels.constrained_forward[dtype](ConstrainedForwardArgs{problem, nullptr, wide(pair)}, all(batch.rows));
    kernels.constrained_forward[dtype](ConstrainedForwardArgs{problem, y, wide(pair)}, all(batch.rows));
    kernels.constrained_backward[dtype](ConstrainedBackwardArgs{problem, g, wide(pair), dx, dk, wide(d_upper)},
                                        all(batch.rows));
  }
  calls += 11;
  if (batch.offsets) return;
  kernels.topk_mask[dtype](TopkMaskArgs{batch, k, 1, y}, all(batch.rows));
  // The probabilities may be invalid. The sample may then be wrong, but all accesses must stay within the row.
  auto keys = block(entries), start = block(8 * rows);
  for (size_t i = 0; i < entries; ++i) keys[i] = static_cast<char>(engine());
  for (size_t r = 0; r < rows; ++r) wide(start)[r] = uniform();
  Batch probabilities = batch;
  probabilities.mask = nullptr;
  kernels.forward[dtype](ForwardArgs{batch, k, 1, Output::projection, y, const_cast<void*>(nu)}, all(batch.rows));
  probabilities.x = y;
  kernels.systematic_sample[dtype](
      SystematicSampleArgs{probabilities, k, 1, reinterpret_cast<const uint8_t*>(keys.get()), wide(start), dx},
      all(batch.rows));
  // Use three rows per part, so that twelve rows form four parts and two rows form one incomplete part.
  const size_t work = dtype == 1 ? 8 : 4, width = static_cast<size_t>(batch.width), parts = (rows + 2) / 3;
  auto mu = block(8 * width), projected = block(work * entries), inverse = block(work * rows),
       sums = block(24 * parts * width);
  for (size_t j = 0; j < width; ++j) wide(mu)[j] = value(0);
  Batch unmasked = batch;
  unmasked.mask = nullptr;
  kernels.balanced_forward[dtype](
      BalancedForwardArgs{unmasked, k, 1, wide(mu), 3, projected.get(), inverse.get(), wide(sums)},
      all(static_cast<int64_t>(parts)));
  sums = block(8 * parts * width);
  kernels.balanced_product[dtype](
      BalancedProductArgs{y, inverse.get(), wide(mu), batch.rows, batch.width, 3, wide(sums)},
      all(static_cast<int64_t>(parts)));
}

// Runs the losses, with labels as a list (`hot` is false) or as a bool for each entry. Some labels and some offsets are
// outside their rows, which must be harmless.
void run_loss(const Kernels& kernels, int dtype, const Batch& batch, const double* k, bool hot, bool weighted) {
  const size_t wide = dtype == 1 ? 8 : 4, rows = static_cast<size_t>(batch.rows);
  const int64_t per_row = static_cast<int64_t>(engine() % 20);
  const int64_t number = hot ? batch.total : per_row * batch.rows;
  auto listed = block(8 * static_cast<size_t>(number)), starts = block(8 * (rows + 1)),
       observed = block(static_cast<size_t>(number)), weight = block(wide * static_cast<size_t>(number)),
       loss = block(2 * wide * rows), nu = block(2 * wide * rows), grad = block(wide * rows),
       dx = block(size_of(dtype) * static_cast<size_t>(batch.total)), dk = block(8 * rows);
  const int64_t reach = batch.offsets ? batch.total : batch.width;
  for (int64_t i = 0; i < number; ++i) {
    observed[static_cast<size_t>(i)] = uniform() < 0.2;
    put(weight.get(), i, dtype == 1 ? 1 : 0, uniform() < 0.2 ? 0 : uniform());
    if (!hot) {
      const int64_t label = static_cast<int64_t>(uniform() * static_cast<double>(reach + 2)) - 1;
      reinterpret_cast<int64_t*>(listed.get())[i] = uniform() < 0.01 ? INT64_MAX : label;
    }
  }
  for (size_t r = 0; r <= rows; ++r) {
    const bool bad = uniform() < 0.05;
    reinterpret_cast<int64_t*>(starts.get())[r] = bad ? number + 9 - 20 * (r % 2) : per_row * static_cast<int64_t>(r);
  }
  for (size_t r = 0; r < rows; ++r) put(grad.get(), static_cast<int64_t>(r), dtype == 1 ? 1 : 0, value(0));
  const LabelArgs labels{hot ? nullptr : reinterpret_cast<const int64_t*>(listed.get()),
                         !hot && batch.offsets ? reinterpret_cast<const int64_t*>(starts.get()) : nullptr,
                         hot ? reinterpret_cast<const bool*>(observed.get()) : nullptr,
                         weighted ? weight.get() : nullptr,
                         per_row,
                         number};
  const ForwardArgs solve{batch, k, 1, Output::none, nullptr, nu.get()};
  kernels.loss_forward[dtype](LossForwardArgs{solve, labels, loss.get()}, all(batch.rows));
  kernels.loss_backward[dtype](
      LossBackwardArgs{batch, labels, grad.get(), 1, k, 1, nu.get(), dx.get(), reinterpret_cast<double*>(dk.get())},
      all(batch.rows));
  // Repeat in place: the gradient overwrites a copy of x.
  Batch overwritten = batch;
  if (batch.total) std::memcpy(dx.get(), batch.x, size_of(dtype) * static_cast<size_t>(batch.total));
  overwritten.x = dx.get();
  kernels.loss_backward[dtype](LossBackwardArgs{overwritten, labels, grad.get(), 1, k, 1, nu.get(), dx.get(),
                                                reinterpret_cast<double*>(dk.get())},
                               all(batch.rows));
  calls += 2;
}

void run(const Kernels& kernels, int dtype, int64_t rows, int64_t width, bool packed, bool masked, int style) {
  const size_t size = size_of(dtype), wide = dtype == 1 ? 8 : 4;
  auto offsets = block(sizeof(int64_t) * static_cast<size_t>(rows + 1));
  auto* at = reinterpret_cast<int64_t*>(offsets.get());
  at[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    at[r + 1] = at[r] + (packed ? static_cast<int64_t>(uniform() * static_cast<double>(width + 1)) : width);
  }
  const int64_t total = at[rows];
  // Offsets that the Python code would reject must be harmless.
  if (packed && uniform() < 0.2) at[engine() % static_cast<size_t>(rows + 1)] = engine() % 2 ? total + 5 : -3;
  auto x = block(size * static_cast<size_t>(total)), y = block(size * static_cast<size_t>(total)),
       g = block(size * static_cast<size_t>(total)), dx = block(size * static_cast<size_t>(total)),
       mask = block(static_cast<size_t>(total)), nu = block(2 * wide * static_cast<size_t>(rows)),
       row_grad = block(wide * static_cast<size_t>(rows));
  auto k = block(8 * static_cast<size_t>(rows)), dk = block(8 * static_cast<size_t>(rows));
  for (int64_t i = 0; i < total; ++i) {
    put(x.get(), i, dtype, value(style));
    put(g.get(), i, dtype, value(style == 3 ? 3 : 0));
    mask[static_cast<size_t>(i)] = uniform() < 0.7;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const double n = static_cast<double>(width), u = uniform();
    const double choices[] = {0, n, 1, n - 1, std::floor(u * (n + 1)), u * n, 1e-6, n - 1e-6, u < 0.1 ? NAN : n / 2};
    reinterpret_cast<double*>(k.get())[r] = choices[engine() % 9];
    put(row_grad.get(), r, dtype == 1 ? 1 : 0, value(0));
  }
  const Batch batch{
      x.get(), masked ? reinterpret_cast<const bool*>(mask.get()) : nullptr, packed ? at : nullptr, rows, width, total};
  for (const Output output : {Output::none, Output::logarithm, Output::projection}) {
    kernels.forward[dtype](ForwardArgs{batch, reinterpret_cast<double*>(k.get()), 1, output,
                                       output == Output::none ? nullptr : y.get(), nu.get()},
                           all(rows));
    ++calls;
    if (output == Output::none) continue;
    const Gradient kind = output == Output::logarithm ? Gradient::logarithm : Gradient::projection;
    kernels.backward[dtype](
        BackwardArgs{batch, kind, g.get(), y.get(), nu.get(), dx.get(), reinterpret_cast<double*>(dk.get())},
        all(rows));
  }
  kernels.backward[dtype](BackwardArgs{batch, Gradient::dual, row_grad.get(), nullptr, nu.get(), dx.get(),
                                       reinterpret_cast<double*>(dk.get())},
                          all(rows));
  run_family(kernels, dtype, batch, reinterpret_cast<double*>(k.get()), g.get(), nu.get(), y.get(), dx.get(),
             reinterpret_cast<double*>(dk.get()), static_cast<size_t>(total));
  for (int form = 0; form < 4; ++form) {
    run_loss(kernels, dtype, batch, reinterpret_cast<const double*>(k.get()), form & 1, form & 2);
  }
  if (dtype > 1 || packed) return;
  for (int64_t i = 0; i < total; ++i) {
    const double a = dtype ? reinterpret_cast<double*>(y.get())[i] : reinterpret_cast<float*>(y.get())[i];
    if (!(a != a || (a >= 0 && a <= 1))) ++failures;
  }
}

}  // namespace

int main() {
  std::vector<const Kernels*> tables = {&kernels_baseline};
#ifdef TORCHLML_X86_LEVELS
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&kernels_v3);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) tables.push_back(&kernels_v4);
#endif
  const int64_t widths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 257, 1000, 1003, 4099};
  for (const Kernels* kernels : tables) {
    for (int dtype = 0; dtype < dtype_count; ++dtype) {
      for (const int64_t width : widths) {
        for (int style = 0; style < 7; ++style) {
          for (int form = 0; form < 4; ++form) {
            run(*kernels, dtype, width > 500 ? 3 : 12, width, form & 1, form & 2, style);
          }
        }
      }
      run(*kernels, dtype, 0, 5, false, false, 0);
      for (const int style : {0, 1, 3}) run(*kernels, dtype, 2, 1000000 + style, false, style == 3, style);
    }
    std::printf("%s: %ld calls so far, %d values outside [0, 1]\n", kernels->name, calls, failures);
  }
  return failures != 0;
}
