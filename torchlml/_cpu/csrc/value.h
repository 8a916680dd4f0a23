// The optimal value of the projection problem, sum(softplus(x + nu)) - k * nu, for each row.
#pragma once

#include "backward.h"

namespace torchlml {
namespace {

// Each entry with z > 0 contributes nu to the sum. For k near n, these terms would nearly cancel with k * nu. Therefore
// the value is computed as the sum of x over the entries with z > 0, plus (number of these entries - k) * nu, plus the
// sum of log(1 + exp(-|z|)) over all entries.
template <class S>
double row_value(const Row<S>& row, double k, typename Work<S>::type high, typename Work<S>::type low) {
  using T = typename Work<S>::type;
  const S* x = row.x;
  const bool* mask = row.mask;
  Vec<T> block_rest{};
  LongSum<T> rest, tops;
  Mask<T> above{};
  each_vector_in_blocks<T, block_vectors>(
      row.n,
      [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec<T> a = read(x + i, count), z = (a + high) + low;
        Mask<T> up = greater(z, T{0});
        Vec<T> part = vlog1p(vexp(-vabs(z)));
        if (mask || count < lanes<T>) {
          const Mask<T> there = mask ? load_mask<T>(mask + i, count) : first_lanes<T>(count);
          up &= there;
          part = keep<T>(there, part);
        }
        block_rest += part;
        above += up;
        Vec<T> top = keep<T>(up, a);
        tops.take(top);
      },
      [&]() __attribute__((always_inline)) { rest.take(block_rest); });
  const double nu = static_cast<double>(high) + static_cast<double>(low);
  const double value = total(tops.sum) + (static_cast<double>(-total_lanes(above)) - k) * nu + total(rest.sum);
  return value == value ? value : HUGE_VAL;  // an entry of +inf leads to inf - inf in the compensated sum
}

// The value in special cases: 0 for k = 0, the sum of the entries if there are at most k entries, and +inf if an entry
// is +inf.
template <class S>
double limit_value(const Row<S>& row, double k, double high) {
  if (high != high) return high;
  if (!(k > 0)) return 0;
  double sum = 0;
  for (int64_t i = 0; i < row.n; ++i) {
    if (!row.available(i)) continue;
    const double a = static_cast<double>(load_one(row.x + i));
    if (a > -HUGE_VAL) sum += a;
  }
  return high > 0 ? sum : HUGE_VAL;
}

template <class S>
void value_rows(const ValueArgs& args, const Rows& rows) {
  using T = typename Work<S>::type;
  const Batch& batch = args.solve.batch;
  // Process a few rows at a time, so that they are still in the cache when their values are computed.
  const int64_t some = batch.rows ? 1 + 8192 / (batch.total / batch.rows + 1) : 1;
  for (int64_t first = rows.begin; first < rows.end; first += some) {
    const int64_t last = rows.end - first < some ? rows.end : first + some;
    forward_rows<S>(args.solve, {first, last, rows.team});
    for (int64_t r = first; r < last; ++r) {
      const Row<S> row(batch, row_span(batch, r));
      const T* nu = static_cast<const T*>(args.solve.nu) + r;
      const double k = args.solve.k[r * args.solve.k_stride];
      const bool finite = nu[0] - nu[0] == 0;
      args.value[r] =
          finite ? row_value(row, k, nu[0], nu[batch.rows]) : limit_value(row, k, static_cast<double>(nu[0]));
    }
  }
}

}  // namespace
}  // namespace torchlml
