// Compiled once per instruction set, with LML_KERNELS naming the table (see setup.py).
#include "backward.h"
#include "capped_backward.h"
#include "choice.h"
#include "loss.h"
#include "value.h"

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
    {loss_forward_rows<float>, loss_forward_rows<double>, loss_forward_rows<bfloat16>, loss_forward_rows<float16>},
    {loss_backward_rows<float>, loss_backward_rows<double>, loss_backward_rows<bfloat16>, loss_backward_rows<float16>},
    {value_rows<float>, value_rows<double>, value_rows<bfloat16>, value_rows<float16>},
    {capped_rows<float>, capped_rows<double>, capped_rows<bfloat16>, capped_rows<float16>},
    {capped_backward_rows<float>, capped_backward_rows<double>, capped_backward_rows<bfloat16>,
     capped_backward_rows<float16>},
    {choose_rows<float>, choose_rows<double>, choose_rows<bfloat16>, choose_rows<float16>},
    {sample_rows<float>, sample_rows<double>, sample_rows<bfloat16>, sample_rows<float16>},
};

}  // namespace torchlml
