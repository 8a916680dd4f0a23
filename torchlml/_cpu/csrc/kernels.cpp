// This file is compiled once per instruction set. LML_KERNELS is the name of its table of kernels (see setup.py).
#include "backward_rows.h"
#include "balanced.h"
#include "choice.h"
#include "constrained_backward.h"
#include "loss.h"
#include "value.h"

#ifndef LML_KERNELS
#define LML_KERNELS kernels_baseline
#define LML_KERNELS_NAME "baseline"
#endif

namespace torchlml {

extern const Kernels LML_KERNELS = {LML_KERNELS_NAME,
#define LML_DEFINE(kernel, Args) \
  {kernel##_rows<float>, kernel##_rows<double>, kernel##_rows<bfloat16>, kernel##_rows<float16>},
                                    LML_KERNELS_TABLE(LML_DEFINE)
#undef LML_DEFINE
};

}  // namespace torchlml
