// Compiled once per instruction set, with LML_KERNELS naming the table (see setup.py).
#include "backward.h"

#ifndef LML_KERNELS
#define LML_KERNELS kernels_baseline
#define LML_KERNELS_NAME "baseline"
#endif

namespace torchlml {

// Order of enum Dtype.
extern const Kernels LML_KERNELS = {
    LML_KERNELS_NAME,
    {forward_rows<float>, forward_rows<double>, forward_rows<bfloat16>, forward_rows<float16>},
    {backward_rows<float>, backward_rows<double>, backward_rows<bfloat16>, backward_rows<float16>},
};

}  // namespace torchlml
