// Checks the tensors of a call, converts them to kernel arguments and allocates results, using LibTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "kernels.h"

namespace torchlml {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

int dtype_index(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return static_cast<int>(Dtype::float32);
    case ScalarType::Double: return static_cast<int>(Dtype::float64);
    case ScalarType::BFloat16: return static_cast<int>(Dtype::bfloat16);
    case ScalarType::Half: return static_cast<int>(Dtype::float16);
    default: STD_TORCH_CHECK(false, "`x` must be float16, bfloat16, float32 or float64.");
  }
}

ScalarType work_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void check(const Tensor& t, const char* name, ScalarType dtype, int64_t numel) {
  STD_TORCH_CHECK(t.is_contiguous() && t.is_cpu() && t.scalar_type() == dtype && t.numel() == numel, "`", name,
                  "` must be a contiguous CPU tensor with the dtype and size that the operator's Python definition "
                  "describes.");
}

Batch make_batch(const Tensor& x, const OptionalTensor& mask, const OptionalTensor& offsets) {
  Batch b{};
  b.total = x.numel();
  check(x, "x", x.scalar_type(), b.total);
  b.x = x.const_data_ptr();
  if (mask) {
    check(*mask, "mask", ScalarType::Bool, b.total);
    b.mask = static_cast<const bool*>(mask->const_data_ptr());
  }
  if (offsets) {
    STD_TORCH_CHECK(x.dim() == 1 && offsets->numel() >= 1,
                    "If `offsets` is given, it must not be empty and `x` must be one-dimensional.");
    check(*offsets, "offsets", ScalarType::Long, offsets->numel());
    b.offsets = static_cast<const int64_t*>(offsets->const_data_ptr());
    b.rows = offsets->numel() - 1;
  } else {
    STD_TORCH_CHECK(x.dim() == 2, "`x` must have two dimensions.");
    b.rows = x.size(0);
    b.width = x.size(1);
  }
  return b;
}

// Allocates a contiguous CPU tensor. Calling aoti_torch_empty_strided directly is three times as fast as a call through
// the dispatcher.
Tensor empty(const int64_t* sizes, int64_t dim, int32_t dtype) {
  int64_t strides[2] = {1, 1};
  if (dim == 2) strides[0] = sizes[1] > 1 ? sizes[1] : 1;
  AtenTensorHandle handle = nullptr;
  const int32_t device = aoti_torch_device_type_cpu();
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype, device, 0, &handle));
  return Tensor(handle);
}

Tensor empty_beside(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return empty(x.sizes().data(), x.dim(), dtype);
}

Tensor empty_nu(const Tensor& x, int64_t rows) {
  const int64_t sizes[2] = {2, rows};
  return empty(sizes, 2, work_dtype(x) == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
}

// Returns a pointer to the values of k. Sets `stride` to 1 if each row has its own k, and to 0 if all rows share one k.
const double* read_k(const Tensor& k, int64_t rows, int64_t& stride) {
  stride = k.dim() == 0 ? 0 : 1;
  check(k, "k", ScalarType::Double, stride ? rows : 1);
  return static_cast<const double*>(k.const_data_ptr());
}

}  // namespace
}  // namespace torchlml
