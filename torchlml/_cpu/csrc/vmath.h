// exp, log(1 + t) and the logistic function on vectors.
//
// The polynomials are Chebyshev interpolants. tools/fit_vmath.py computes the coefficients, compares them with the
// digits below and prints the relative errors before rounding: 1e-7 (float) and 8e-18 (double) for exp, 4e-9 and 2e-18
// for log1p.
#pragma once

#include <math.h>

#include "simd.h"

namespace torchlml {
namespace {

// The scale of exp and the argument below which it is exactly 0. `Plain` is for exp(a) with a <= 0. `Stored` is for
// exp(a) times a power of two, so that the stored number is normal whenever its product with another exponential is.
struct Plain {
  static constexpr float scale(float) { return 1; }
  static constexpr double scale(double) { return 1; }
  static constexpr float floor(float) { return -87; }
  static constexpr double floor(double) { return -708; }
};
struct Stored {
  static constexpr float scale(float) { return 0x1p35f; }
  static constexpr double scale(double) { return 0x1p300; }
  static constexpr float floor(float) { return -104; }
  static constexpr double floor(double) { return -900; }
};

// Like `Stored`, for arguments that are known to be above the floor.
struct Within : Stored {
  static constexpr float floor(float) { return -HUGE_VALF; }
};

// Evaluates a polynomial whose coefficients are given from the highest power down to the constant.
template <class V>
LML_INLINE V horner(V, V p) {
  return p;
}
template <class V, class C, class... Rest>
LML_INLINE V horner(V x, V p, C next, Rest... rest) {
  return horner(x, p * x + next, rest...);
}

template <class Range = Plain>
LML_INLINE vfloat vexp(vfloat a) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  constexpr float scale = Range::scale(0.0f);
  const vfloat shifted = a * 1.44269504f + shift;
  const vfloat n = shifted - shift;
#if defined(__FMA__)
  const vfloat r = a - n * 0.693147180559945f;
#else
  const vfloat r = (a - n * 0.693359375f) + n * 2.12194440e-4f;
#endif
  // Use Estrin's scheme, which shortens the dependency chains, so that more of them fit into the reorder buffer.
  const vfloat r2 = r * r;
  const vfloat p01 = scale * 1.0000000107715701f * r + scale * 1.0000000754548972f;
  const vfloat p23 = scale * 0.16666505260408123f * r + scale * 0.49998869378303398f;
  const vfloat p45 = scale * 0.0083691484908563466f * r + scale * 0.041917507249615261f;
  const vfloat p = (p45 * r2 + p23) * r2 + p01;
  const vfloat scaled = cast_bits<vfloat>(cast_bits<ifloat>(p) + (cast_bits<ifloat>(shifted) << 23));
  if constexpr (Range::floor(0.0f) == -HUGE_VALF) return scaled;
  return keep<float>(greater(a, Range::floor(0.0f)), scaled);
}

template <class Range = Plain>
LML_INLINE vdouble vexp(vdouble a) {
  constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52
  constexpr double scale = Range::scale(0.0);
  const vdouble shifted = a * 1.4426950408889634 + shift;
  const vdouble n = shifted - shift;
  const vdouble r = (a - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  const vdouble p =
      horner(r, splat(scale * 2.5110037605963777712e-8), scale * 2.7632639639041029749e-7,
             scale * 2.7557240918578969823e-6, scale * 0.000024801485482328492419, scale * 0.00019841269890047113707,
             scale * 0.0013888888952314774652, scale * 0.0083333333333196006109, scale * 0.041666666666488095495,
             scale * 0.16666666666666680806, scale * 0.50000000000000183855, scale, scale);
  const vdouble scaled = cast_bits<vdouble>(cast_bits<idouble>(p) + (cast_bits<idouble>(shifted) << 52));
  return keep<double>(greater(a, Range::floor(0.0)), scaled);
}

// Computes log(1 + t) for 0 <= t <= 1, as 2 * atanh(t / (2 + t)), which has full relative accuracy even for tiny t.
// The added constant keeps the square of a tiny number from being subnormal, because subnormal arithmetic is slow.
LML_INLINE vfloat vlog1p(vfloat t) {
  const vfloat s = t / (2.0f + t), q = (s + 1e-18f) * (s + 1e-18f);
  return s * horner(q, splat(0.28157778363109081f), 0.27965157745197269f, 0.40024595230703748f, 0.66666321641377773f,
                    2.0000000076817589f);
}
LML_INLINE vdouble vlog1p(vdouble t) {
  const vdouble s = t / (2.0 + t), q = (s + 1e-150) * (s + 1e-150);
  return s * horner(q, splat(0.17044163562781398129), 0.083245065118608205757, 0.12110168728069217655,
                    0.13300374032674624337, 0.15386614042304007762, 0.1818174083250480451, 0.22222224080747673173,
                    0.28571428545454114534, 0.40000000000185747468, 0.66666666666666149594, 2.0);
}

// The common terms of all formulas in z: a = exp(-|z|) and r = 1 / (1 + a). Then sigmoid(-|z|) = a * r and
// w = a * r^2 have full relative accuracy, and 1 - a * r is exactly 1 at infinity, although r is an approximation. The
// approximation a is clamped to 1, because sigmoid(0) must be 1/2.
template <class T>
struct Logistic {
  Vec<T> a, r;
  LML_INLINE explicit Logistic(Vec<T> z) : a(vmin(splat(T{1}), vexp(-vabs(z)))), r(reciprocal(1 + a)) {}
  LML_INLINE Vec<T> sigma(Vec<T> z) const { return select<T>(greater(z, T{0}), 1 - a * r, a * r); }
  LML_INLINE Vec<T> weight() const { return a * r * r; }
};

}  // namespace
}  // namespace torchlml
