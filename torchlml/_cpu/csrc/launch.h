// Selects the kernels for this processor and distributes the rows of a call over torch's threads.
#pragma once

#include <cstdlib>
#include <cstring>

#include "tensors.h"

namespace torchlml {
namespace {

// Returns the best table of kernels that this processor supports. TORCHLML_ISA=baseline|v3|v4 selects a lower level,
// for tests. The variable has no effect if the processor does not support the level, or if the name is unknown.
const Kernels& choose_kernels() {
#ifdef TORCHLML_X86_LEVELS
  const char* asked = std::getenv("TORCHLML_ISA");
  const auto wanted = [&](const char* name) { return !asked || std::strcmp(asked, name) == 0; };
  const int level = processor_level();
  if (asked && wanted("baseline")) return kernels_baseline;
  if (asked && level >= 3 && wanted("v3")) return kernels_v3;
  if (level >= 4) return kernels_v4;
  if (level >= 3) return kernels_v3;
#endif
  return kernels_baseline;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

// Calls f for ranges of rows, in parallel. Each range has at least about 8192 entries, so that small batches do not
// start more threads than they need.
template <class F>
void each_rows(const Batch& b, const F& f) {
  if (b.rows == 0) return;
  const int64_t entries = b.total / b.rows + 1, grain = 8192 / entries;
  if (b.rows <= grain) return f(Rows{0, b.rows, nullptr});
  torch::stable::parallel_for(0, b.rows, grain > 1 ? grain : 1,
                              [&](int64_t begin, int64_t end) { f(Rows{begin, end, nullptr}); });
}

void run_team(int64_t pieces, void (*piece)(const void*, int64_t), const void* context) {
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) piece(context, i);
  });
}

// Like `each_rows`, but for kernels that can split a long row. If there are too few long rows to keep every thread
// busy, the short rows run first, and then all threads work on one long row at a time. Both schedules give bitwise
// identical results.
template <class F>
void each_rows_or_piece(const Batch& b, const F& f) {
  const auto is_long = [&](int64_t r) { return row_span(b, r).size > long_row; };
  int64_t count = b.offsets ? 0 : b.width > long_row ? b.rows : 0;
  if (b.offsets && b.total > long_row) {
    for (int64_t r = 0; r < b.rows; ++r) count += is_long(r);
  }
  const int64_t threads = count ? torch::stable::get_num_threads() : 1;
  if (threads == 1 || count >= 4 * threads || (count == b.rows && count % threads == 0)) return each_rows(b, f);
  if (count < b.rows) {
    each_rows(b, [&](const Rows& rows) {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t begin = r;
        while (r < rows.end && !is_long(r)) ++r;
        if (r > begin) f(Rows{begin, r, nullptr});
      }
    });
  }
  for (int64_t r = 0; r < b.rows; ++r) {
    if (is_long(r)) f(Rows{r, r + 1, run_team});
  }
}

template <class Args>
using Table = Kernel<Args> (Kernels::*)[dtype_count];

template <class Args>
void launch(Table<Args> kernel, const Tensor& x, const Batch& batch, const Args& args) {
  const Kernel<Args> chosen = (kernels().*kernel)[dtype_index(x)];
  each_rows(batch, [&](const Rows& rows) { chosen(args, rows); });
}

template <class Args>
void launch_split(Table<Args> kernel, const Tensor& x, const Batch& batch, const Args& args) {
  const Kernel<Args> chosen = (kernels().*kernel)[dtype_index(x)];
  each_rows_or_piece(batch, [&](const Rows& rows) { chosen(args, rows); });
}

}  // namespace
}  // namespace torchlml
