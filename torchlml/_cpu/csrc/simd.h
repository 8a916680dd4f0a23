// Vectors for one instruction set, based on GCC/Clang vector extensions, with intrinsics only where compilers do not
// generate the best instruction. Everything has internal linkage, because the same source is compiled once per
// instruction set and the linker must never merge the copies.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LML_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define LML_VECTOR_BYTES 32
#else
#define LML_VECTOR_BYTES 16
#endif
#define LML_INLINE inline __attribute__((always_inline))

namespace torchlml {
namespace {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(LML_VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(LML_VECTOR_BYTES)));
  typedef uint16_t H __attribute__((vector_size(LML_VECTOR_BYTES / 2)));  // the same number of 16-bit lanes
  typedef int8_t B __attribute__((vector_size(LML_VECTOR_BYTES / 4)));    // the same number of 8-bit lanes
};
template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(LML_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(LML_VECTOR_BYTES)));
  typedef int8_t B __attribute__((vector_size(LML_VECTOR_BYTES / 8)));
};
template <class T>
using Vec = typename Lanes<T>::V;
template <class T>
using Mask = typename Lanes<T>::I;
template <class T>
constexpr int lanes = LML_VECTOR_BYTES / int(sizeof(T));

using vfloat = Vec<float>;
using vdouble = Vec<double>;
using ifloat = Mask<float>;
using idouble = Mask<double>;
using vhalf = Lanes<float>::H;
typedef float half_vfloat __attribute__((vector_size(LML_VECTOR_BYTES / 2)));

// The dtype of the computation: float64 for float64, and float32 for all other dtypes.
template <class S>
struct Work {
  using type = float;
};
template <>
struct Work<double> {
  using type = double;
};

template <class T>
LML_INLINE Vec<T> splat(T a) {
  return a - Vec<T>{};
}

template <class To, class From>
LML_INLINE To cast_bits(From a) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast requires types of the same size");
  To to;
  std::memcpy(&to, &a, sizeof to);
  return to;
}

// The minimum as x86 defines it: b if either operand is NaN.
LML_INLINE vfloat vmin(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vfloat)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}
LML_INLINE vdouble vmin(vdouble a, vdouble b) {
#if defined(__AVX512F__)
  return (vdouble)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (vdouble)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  return (vdouble)_mm_min_pd((__m128d)a, (__m128d)b);
#else
  return a < b ? a : b;
#endif
}

LML_INLINE vfloat vabs(vfloat a) { return cast_bits<vfloat>(cast_bits<ifloat>(a) & 0x7fffffff); }
LML_INLINE vdouble vabs(vdouble a) { return cast_bits<vdouble>(cast_bits<idouble>(a) & 0x7fffffffffffffffLL); }

// Returns a > b as a lane mask. (`>` and `?:` on 64-bit lanes break GCC 12 without SSE4.1.)
LML_INLINE ifloat greater(vfloat a, vfloat b) { return a > b; }
LML_INLINE idouble greater(vdouble a, vdouble b) {
#if defined(__SSE2__) && !defined(__AVX2__)
  return (idouble)_mm_cmpgt_pd((__m128d)a, (__m128d)b);
#else
  return a > b;
#endif
}
LML_INLINE ifloat greater(vfloat a, float b) { return greater(a, splat(b)); }
LML_INLINE idouble greater(vdouble a, double b) { return greater(a, splat(b)); }

// Returns a where the mask is set, and b otherwise.
template <class T>
LML_INLINE Vec<T> select(Mask<T> mask, Vec<T> a, Vec<T> b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
  } else {
    return (Vec<T>)_mm256_blendv_pd((__m256d)b, (__m256d)a, (__m256d)mask);
  }
#else
  return cast_bits<Vec<T>>((mask & cast_bits<Mask<T>>(a)) | (~mask & cast_bits<Mask<T>>(b)));
#endif
}

// Returns a where the mask is set, and 0 otherwise.
template <class T>
LML_INLINE Vec<T> keep(Mask<T> mask, Vec<T> a) {
  return cast_bits<Vec<T>>(mask & cast_bits<Mask<T>>(a));
}

// Returns a, negated where the mask is set.
template <class T>
LML_INLINE Vec<T> negate_where(Mask<T> mask, Vec<T> a) {
  constexpr auto sign = sizeof(T) == 4 ? int64_t{INT32_MIN} : INT64_MIN;
  using I = decltype(Mask<T>{}[0] + 0);
  return cast_bits<Vec<T>>((mask & static_cast<I>(sign)) ^ cast_bits<Mask<T>>(a));
}

template <class T>
LML_INLINE bool any(Mask<T> mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#else
  bool found = false;
  for (int i = 0; i < lanes<T>; ++i) found |= mask[i] != 0;
  return found;
#endif
}

// Returns a mask that is true in the first `count` lanes.
template <class T>
LML_INLINE Mask<T> first_lanes(int64_t count) {
  Vec<T> index;
  for (int i = 0; i < lanes<T>; ++i) index[i] = static_cast<T>(i);
  return greater(splat(static_cast<T>(count)), index);
}

// Computes 1 / a for 1 <= |a| < 1e37. On x86, it avoids division, which would be the most expensive instruction. The
// result is accurate to about the last digit. With `rough`, only one Newton step is taken, and before rounding, the
// magnitude of the result is too small, by a relative error of up to 1.4e-7.
template <bool rough = false>
LML_INLINE vfloat reciprocal(vfloat a) {
#if defined(__SSE2__)
#if defined(__AVX512F__)
  const vfloat r = (vfloat)_mm512_rcp14_ps((__m512)a);
#elif defined(__AVX2__)
  const vfloat r = (vfloat)_mm256_rcp_ps((__m256)a);
#else
  const vfloat r = (vfloat)_mm_rcp_ps((__m128)a);
#endif
  if constexpr (rough) return r * (2.0f - a * r);
  const vfloat e = 1.0f - a * r;
  return r + r * (e + e * e);
#else
  return 1.0f / a;
#endif
}
template <bool rough = false>
LML_INLINE vdouble reciprocal(vdouble a) {
  return 1.0 / a;
}

// Operations within the 128-bit parts of a vector of floats, and the types that they take.
#if defined(__AVX512F__)
#define LML_WITHIN(name) _mm512_##name
using part_t = __m512;
using pairs_t = __m512d;
#elif defined(__AVX2__)
#define LML_WITHIN(name) _mm256_##name
using part_t = __m256;
using pairs_t = __m256d;
#elif defined(__SSE2__)
#define LML_WITHIN(name) _mm_##name
using part_t = __m128;
using pairs_t = __m128d;
#endif

// Transposes a square matrix.
LML_INLINE void transpose(vfloat (&a)[lanes<float>]) {
#if defined(__SSE2__)
  // Transpose the 4 x 4 blocks within the 128-bit parts of the vectors, then exchange these parts.
  part_t b[lanes<float>];
  for (int i = 0; i < lanes<float>; i += 4) {
    const pairs_t low01 = (pairs_t)LML_WITHIN(unpacklo_ps)((part_t)a[i], (part_t)a[i + 1]);
    const pairs_t high01 = (pairs_t)LML_WITHIN(unpackhi_ps)((part_t)a[i], (part_t)a[i + 1]);
    const pairs_t low23 = (pairs_t)LML_WITHIN(unpacklo_ps)((part_t)a[i + 2], (part_t)a[i + 3]);
    const pairs_t high23 = (pairs_t)LML_WITHIN(unpackhi_ps)((part_t)a[i + 2], (part_t)a[i + 3]);
    b[i] = (part_t)LML_WITHIN(unpacklo_pd)(low01, low23);
    b[i + 1] = (part_t)LML_WITHIN(unpackhi_pd)(low01, low23);
    b[i + 2] = (part_t)LML_WITHIN(unpacklo_pd)(high01, high23);
    b[i + 3] = (part_t)LML_WITHIN(unpackhi_pd)(high01, high23);
  }
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m512 even01 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88),
                 odd01 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    a[i] = (vfloat)_mm512_shuffle_f32x4(even01, even23, 0x88);
    a[i + 4] = (vfloat)_mm512_shuffle_f32x4(odd01, odd23, 0x88);
    a[i + 8] = (vfloat)_mm512_shuffle_f32x4(even01, even23, 0xdd);
    a[i + 12] = (vfloat)_mm512_shuffle_f32x4(odd01, odd23, 0xdd);
#elif defined(__AVX2__)
    a[i] = (vfloat)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    a[i + 4] = (vfloat)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
#else
    a[i] = (vfloat)b[i];
#endif
  }
#else
  for (int i = 0; i < lanes<float>; ++i) {
    for (int j = 0; j < i; ++j) {
      const float above = a[j][i];
      a[j][i] = a[i][j];
      a[i][j] = above;
    }
  }
#endif
}

// Returns the sum over the lanes of each vector, in a fixed order. It follows the steps of `transpose` and adds after
// each step.
LML_INLINE vfloat sums_over_lanes(vfloat (&a)[lanes<float>]) {
#if defined(__SSE2__)
  part_t b[lanes<float> / 4];
  for (int i = 0; i < lanes<float>; i += 4) {
    const pairs_t sum01 = (pairs_t)(LML_WITHIN(unpacklo_ps)((part_t)a[i], (part_t)a[i + 1]) +
                                    LML_WITHIN(unpackhi_ps)((part_t)a[i], (part_t)a[i + 1]));
    const pairs_t sum23 = (pairs_t)(LML_WITHIN(unpacklo_ps)((part_t)a[i + 2], (part_t)a[i + 3]) +
                                    LML_WITHIN(unpackhi_ps)((part_t)a[i + 2], (part_t)a[i + 3]));
    b[i / 4] = (part_t)LML_WITHIN(unpacklo_pd)(sum01, sum23) + (part_t)LML_WITHIN(unpackhi_pd)(sum01, sum23);
  }
#if defined(__AVX512F__)
  const __m512 low = _mm512_shuffle_f32x4(b[0], b[1], 0x88) + _mm512_shuffle_f32x4(b[0], b[1], 0xdd);
  const __m512 high = _mm512_shuffle_f32x4(b[2], b[3], 0x88) + _mm512_shuffle_f32x4(b[2], b[3], 0xdd);
  return (vfloat)(_mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(__AVX2__)
  return (vfloat)(_mm256_permute2f128_ps(b[0], b[1], 0x20) + _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
  return (vfloat)b[0];
#endif
#else
  transpose(a);
  for (int i = 1; i < lanes<float>; ++i) a[0] += a[i];
  return a[0];
#endif
}

// total(widen(a)) is the sum over the lanes of a, in double and in a fixed order.
LML_INLINE vdouble widen(vfloat a) {
#if defined(__AVX512F__)
  return (vdouble)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a)) +
         (vdouble)_mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)a, 1));
#elif defined(__AVX2__)
  return (vdouble)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)a)) +
         (vdouble)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)a, 1));
#else
  half_vfloat low, high;
  std::memcpy(&low, &a, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&a) + sizeof low, sizeof high);
  return __builtin_convertvector(low, vdouble) + __builtin_convertvector(high, vdouble);
#endif
}
LML_INLINE vdouble widen(vdouble a) { return a; }

LML_INLINE double total(vdouble a) {
#if LML_VECTOR_BYTES == 16
  return a[0] + a[1];
#elif LML_VECTOR_BYTES == 32
  return (a[0] + a[2]) + (a[1] + a[3]);
#else
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
#endif
}
template <class I>
LML_INLINE int64_t total_lanes(I a) {
  int64_t sum = 0;
  for (int i = 0; i < int(sizeof(I) / sizeof(a[0])); ++i) sum += a[i];
  return sum;
}

}  // namespace
}  // namespace torchlml
