// Lets an AVX2 processor run the AVX-512 kernels. emulate_avx512.py adds this header to every file with `-include`, but
// it has an effect only on kernels that are compiled for x86-64-v3. The compiler splits 64-byte vectors into two
// halves, and the functions below replace the AVX-512 intrinsics that the kernels use. All of them round as the
// instructions do, except for _mm512_rcp14_ps. The results of this instruction differ between processors, with a
// relative error of up to 2^-14. The error of the replacement is nearly as large.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>  // must come before the definition of __AVX512F__, because immintrin.h tests that macro

#include <cstring>

#define __AVX512F__ 1
#ifdef LML_KERNELS_NAME
#undef LML_KERNELS_NAME
#define LML_KERNELS_NAME "v4 (emulated)"
#endif

namespace emulated {

template <class Half, class Whole>
inline Half half(Whole a, int i) {
  Half part;
  std::memcpy(&part, reinterpret_cast<const char*>(&a) + i * sizeof part, sizeof part);
  return part;
}
template <class Whole, class Half>
inline Whole join(Half low, Half high) {
  Whole a;
  std::memcpy(&a, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&a) + sizeof low, &high, sizeof high);
  return a;
}

#define LML_SINGLE(a, i) half<__m256>(a, i)
#define LML_DOUBLE(a, i) half<__m256d>(a, i)
#define LML_BINARY(name, Whole, PART)                                                                 \
  inline Whole name(Whole a, Whole b) {                                                               \
    return join<Whole>(_mm256_##name(PART(a, 0), PART(b, 0)), _mm256_##name(PART(a, 1), PART(b, 1))); \
  }
LML_BINARY(min_ps, __m512, LML_SINGLE)
LML_BINARY(min_pd, __m512d, LML_DOUBLE)
LML_BINARY(unpacklo_ps, __m512, LML_SINGLE)
LML_BINARY(unpackhi_ps, __m512, LML_SINGLE)
LML_BINARY(unpacklo_pd, __m512d, LML_DOUBLE)
LML_BINARY(unpackhi_pd, __m512d, LML_DOUBLE)
#undef LML_BINARY
#undef LML_DOUBLE

inline __m512 sqrt_ps(__m512 a) {
  return join<__m512>(_mm256_sqrt_ps(LML_SINGLE(a, 0)), _mm256_sqrt_ps(LML_SINGLE(a, 1)));
}
#undef LML_SINGLE

// Computes 1 / a and clears the last 9 bits of the significand.
inline __m512 rcp14_ps(__m512 a) {
  const __m256i kept = _mm256_set1_epi32(static_cast<int>(0xfffffe00u));
  const auto rough = [&](__m256 part) {
    return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1), part), _mm256_castsi256_ps(kept));
  };
  return join<__m512>(rough(half<__m256>(a, 0)), rough(half<__m256>(a, 1)));
}

inline unsigned test_epi32_mask(__m512i a, __m512i b) {
  unsigned mask = 0;
  int u[16], v[16];
  std::memcpy(u, &a, sizeof u);
  std::memcpy(v, &b, sizeof v);
  for (int i = 0; i < 16; ++i) mask |= unsigned((u[i] & v[i]) != 0) << i;
  return mask;
}

// Selects two 128-bit parts of a, then two of b.
template <int select>
inline __m512 shuffle_f32x4(__m512 a, __m512 b) {
  const auto parts = [](__m512 from, int first, int second) {
    return join<__m256>(half<__m128>(from, first), half<__m128>(from, second));
  };
  return join<__m512>(parts(a, select & 3, select >> 2 & 3), parts(b, select >> 4 & 3, select >> 6 & 3));
}

inline __m512d cvtps_pd(__m256 a) {
  return join<__m512d>(_mm256_cvtps_pd(half<__m128>(a, 0)), _mm256_cvtps_pd(half<__m128>(a, 1)));
}
inline __m512 cvtph_ps(__m256i a) {
  return join<__m512>(_mm256_cvtph_ps(half<__m128i>(a, 0)), _mm256_cvtph_ps(half<__m128i>(a, 1)));
}
inline __m256i cvtps_ph(__m512 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
  return join<__m256i>(_mm256_cvtps_ph(half<__m256>(a, 0), nearest), _mm256_cvtps_ph(half<__m256>(a, 1), nearest));
}

// Reads only the entries whose bit in the mask is set. The others are zero.
template <class Whole, class T>
inline Whole maskz_loadu(unsigned mask, const T* p) {
  T entries[sizeof(Whole) / sizeof(T)] = {};
  for (int i = 0; i < int(sizeof(Whole) / sizeof(T)); ++i) {
    if (mask >> i & 1) entries[i] = p[i];
  }
  Whole a;
  std::memcpy(&a, entries, sizeof a);
  return a;
}

}  // namespace emulated

#define _mm512_min_ps emulated::min_ps
#define _mm512_min_pd emulated::min_pd
#define _mm512_unpacklo_ps emulated::unpacklo_ps
#define _mm512_unpackhi_ps emulated::unpackhi_ps
#define _mm512_unpacklo_pd emulated::unpacklo_pd
#define _mm512_unpackhi_pd emulated::unpackhi_pd
#define _mm512_sqrt_ps emulated::sqrt_ps
#define _mm512_rcp14_ps emulated::rcp14_ps
#define _mm512_test_epi32_mask emulated::test_epi32_mask
#define _mm512_shuffle_f32x4(a, b, select) emulated::shuffle_f32x4<select>(a, b)
#define _mm512_cvtps_pd emulated::cvtps_pd
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph(a, rounding) emulated::cvtps_ph(a)
#define _mm512_castps512_ps256(a) emulated::half<__m256>(a, 0)
#define _mm512_extractf64x4_pd(a, i) emulated::half<__m256d>(a, i)
#define _mm512_maskz_loadu_ps emulated::maskz_loadu<__m512, float>
#define _mm512_maskz_loadu_pd emulated::maskz_loadu<__m512d, double>
#endif
