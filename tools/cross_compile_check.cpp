// Compares the kernels with a float64 reference, without torch. cross.py compiles this program with other compilers and
// for other processors. Every input is a multiple of 1/8 between -16 and 16, which all dtypes represent exactly.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "../torchlml/_cpu/csrc/kernels.h"

using namespace torchlml;

namespace {

using Numbers = std::vector<double>;
std::mt19937_64 engine(1);
const char* const dtype_names[] = {"float32", "float64", "bfloat16", "float16"};
const double limits[] = {4e-6, 4e-12, 4 / 256.0, 4 / 1024.0};
long compared = 0, failures = 0;

// ---------------------------------------------------------------- conversion of dtypes

bool is_wide(int dtype) { return dtype == int(Dtype::float64); }
int work(int dtype) { return is_wide(dtype) ? dtype : int(Dtype::float32); }
size_t size_of(int dtype) { return is_wide(dtype) ? 8 : dtype == int(Dtype::float32) ? 4 : 2; }

// Converts to a 16-bit dtype. The result is exact for zero and for normal numbers with few significant bits.
uint16_t to_16_bits(double a, int dtype) {
  if (dtype == int(Dtype::bfloat16)) {
    const float narrow = static_cast<float>(a);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    return static_cast<uint16_t>(bits >> 16);
  }
  if (a == 0) return 0;
  int exponent;
  const double fraction = std::frexp(std::fabs(a), &exponent);  // in [0.5, 1)
  return static_cast<uint16_t>((a < 0 ? 0x8000 : 0) | ((exponent + 14) << 10) | (int(fraction * 2048) & 0x3ff));
}
double from_16_bits(uint16_t bits, int dtype) {
  if (dtype == int(Dtype::bfloat16)) {
    const uint32_t wide = uint32_t{bits} << 16;
    float a;
    std::memcpy(&a, &wide, 4);
    return a;
  }
  const int exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

// An array of numbers in one of the dtypes.
struct Array {
  int dtype;
  std::vector<char> bytes;
  Array(int type, size_t n) : dtype(type), bytes(n * size_of(type), char(0xff)) {}
  Array(int type, const Numbers& numbers) : Array(type, numbers.size()) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      const float narrow = static_cast<float>(numbers[i]);
      const uint16_t half = to_16_bits(numbers[i], dtype);
      const void* from = is_wide(dtype) ? static_cast<const void*>(&numbers[i]) : &narrow;
      std::memcpy(&bytes[i * size_of(dtype)], size_of(dtype) == 2 ? &half : from, size_of(dtype));
    }
  }
  void* data() { return bytes.data(); }
  double operator[](size_t i) const {
    float narrow = 0;
    double wide = 0;
    uint16_t half = 0;
    const char* at = &bytes[i * size_of(dtype)];
    if (is_wide(dtype)) return std::memcpy(&wide, at, 8), wide;
    if (size_of(dtype) == 4) return std::memcpy(&narrow, at, 4), narrow;
    return std::memcpy(&half, at, 2), from_16_bits(half, dtype);
  }
};

Numbers eighths(size_t n, int reach) {
  Numbers a(n);
  for (double& x : a) x = double(int64_t(engine() % uint64_t(2 * reach + 1)) - reach) / 8;
  return a;
}

// ---------------------------------------------------------------- reference

double sigmoid(double z) { return z > 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z)); }

// The projection of one row and its logarithm, computed by bisection over nu. Masked entries are left out.
struct Truth {
  Numbers y, log_y, w;
  double sum_w = 0;

  Truth(const double* x, const std::vector<char>& mask, size_t begin, size_t n, double k) : y(n), log_y(n), w(n) {
    double low = -80, high = 80;
    for (int step = 0; step < 200; ++step) {
      const double middle = (low + high) / 2;
      // Count an entry near 1 as 1 minus its distance from 1, because in some rows only tiny distances determine nu.
      double whole = -k, rest = 0;
      for (size_t i = 0; i < n; ++i) {
        const double z = x[i] + middle;
        if (mask[begin + i]) whole += z > 0, rest += z > 0 ? -sigmoid(-z) : sigmoid(z);
      }
      (whole + rest < 0 ? low : high) = middle;
    }
    const double nu = (low + high) / 2;
    for (size_t i = 0; i < n; ++i) {
      if (!mask[begin + i]) {
        log_y[i] = -INFINITY;
        continue;
      }
      y[i] = sigmoid(x[i] + nu);
      log_y[i] = -(x[i] + nu > 0 ? std::log1p(std::exp(-x[i] - nu)) : std::log1p(std::exp(x[i] + nu)) - x[i] - nu);
      w[i] = y[i] * sigmoid(-x[i] - nu);  // 1 - y[i] would lose all digits if y[i] is near 1
      sum_w += w[i];
    }
  }
  // The gradient of sum(g * y).
  Numbers gradient(const double* g) const {
    double mean = 0;
    for (size_t i = 0; i < y.size(); ++i) mean += w[i] * g[i] / sum_w;
    Numbers dx(y.size());
    for (size_t i = 0; i < y.size(); ++i) dx[i] = w[i] * (g[i] - mean);
    return dx;
  }
  // The gradient of -log y[label].
  Numbers loss_gradient(size_t label) const {
    Numbers dx(y.size());
    for (size_t i = 0; i < y.size(); ++i) dx[i] = (1 - y[label]) * (w[i] / sum_w - (i == label));
    return dx;
  }
};

void compare(const char* table, const char* what, int dtype, double got, double want) {
  ++compared;
  const double limit = limits[dtype] * std::max(1.0, std::fabs(want));
  if (got == want || std::fabs(got - want) <= limit) return;
  if (++failures <= 10) {
    std::printf("%s, %s, %s: %.9g instead of %.9g\n", table, what, dtype_names[dtype], got, want);
  }
}

// ---------------------------------------------------------------- comparison of a batch

void run(const Kernels& kernels, int dtype, int64_t rows, int64_t width, bool masked, int reach) {
  const auto n = static_cast<size_t>(width), count = static_cast<size_t>(rows), total = n * count;
  const Numbers x = eighths(total, reach), g = eighths(total, 32);
  std::vector<char> mask(total, 1);
  Numbers k(count);
  std::vector<int64_t> labels(count);
  for (size_t r = 0; r < count; ++r) {
    for (size_t i = 0; i < n; ++i) mask[r * n + i] = !masked || i < 2 || engine() % 4;
    const double choices[] = {1, 1.5, 0.25};
    k[r] = choices[engine() % 3];  // below 2, because only two entries are always available
    labels[r] = static_cast<int64_t>(engine() % 2);
  }
  Array xs(dtype, x), gs(dtype, g), y(dtype, total), log_y(dtype, total), dx(dtype, total), loss_dx(dtype, total);
  Array nu(work(dtype), 2 * count), loss(work(dtype), 2 * count), chosen(dtype, total);
  Array ones(work(dtype), Numbers(count, 1.0));
  Numbers dk(count), two(1, 2.0);
  const bool* allowed = masked ? reinterpret_cast<const bool*>(mask.data()) : nullptr;
  const Batch batch{xs.data(), allowed, nullptr, rows, width, rows * width};
  const Rows all{0, rows, nullptr};
  ForwardArgs forward{batch, k.data(), 1, Output::logarithm, log_y.data(), nu.data()};
  kernels.forward[dtype](forward, all);
  forward.output = Output::projection, forward.y = y.data();
  kernels.forward[dtype](forward, all);
  kernels.backward[dtype](
      BackwardArgs{batch, Gradient::projection, gs.data(), y.data(), nu.data(), dx.data(), dk.data()}, all);
  const LabelArgs listed{labels.data(), nullptr, nullptr, nullptr, 1, rows};
  forward.output = Output::none, forward.y = nullptr;
  kernels.loss_forward[dtype](LossForwardArgs{forward, listed, loss.data()}, all);
  kernels.loss_backward[dtype](
      LossBackwardArgs{batch, listed, ones.data(), 1, k.data(), 1, nu.data(), loss_dx.data(), dk.data()}, all);
  kernels.topk_mask[dtype](TopkMaskArgs{batch, two.data(), 0, chosen.data()}, all);
  for (size_t r = 0; r < count; ++r) {
    const size_t begin = r * n, label = static_cast<size_t>(labels[r]);
    const Truth truth(&x[begin], mask, begin, n, k[r]);
    const Numbers gradient = truth.gradient(&g[begin]), loss_gradient = truth.loss_gradient(label);
    Numbers available, sum(2);
    for (size_t i = 0; i < n; ++i) {
      compare(kernels.name, "forward", dtype, y[begin + i], truth.y[i]);
      compare(kernels.name, "log_forward", dtype, log_y[begin + i], truth.log_y[i]);
      compare(kernels.name, "backward", dtype, dx[begin + i], gradient[i]);
      compare(kernels.name, "loss_backward", dtype, loss_dx[begin + i], loss_gradient[i]);
      if (mask[begin + i]) available.push_back(x[begin + i]);
      if (chosen[begin + i] != 0) sum[0] += x[begin + i], sum[1] += chosen[begin + i];
    }
    compare(kernels.name, "loss_forward", work(dtype), loss[r], -truth.log_y[label]);
    std::sort(available.begin(), available.end(), std::greater<double>());
    compare(kernels.name, "topk_mask, number of chosen entries", dtype, sum[1], 2);
    compare(kernels.name, "topk_mask, sum of chosen entries", dtype, sum[0], available[0] + available[1]);
  }
}

}  // namespace

int main() {
  std::vector<const Kernels*> tables = {&kernels_baseline};
#ifdef TORCHLML_X86_LEVELS
  if (processor_level() >= 3) tables.push_back(&kernels_v3);
  if (processor_level() >= 4) tables.push_back(&kernels_v4);
#endif
  for (const Kernels* kernels : tables) {
    for (int dtype = 0; dtype < dtype_count; ++dtype) {
      for (const int64_t width : {2, 3, 4, 5, 8, 17, 64, 100, 1003}) {
        for (int form = 0; form < 4; ++form) run(*kernels, dtype, 6, width, form & 1, form & 2 ? 127 : 24);
      }
    }
    std::printf("%s: %ld numbers compared so far, %ld wrong\n", kernels->name, compared, failures);
  }
  return failures != 0;
}
