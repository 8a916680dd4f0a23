// Loads and stores entries of any dtype as full or partial vectors of the work dtype.
#pragma once

#include "simd.h"

namespace torchlml {
namespace {

LML_INLINE vfloat load(const float* p) {
  vfloat a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
LML_INLINE vdouble load(const double* p) {
  vdouble a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
LML_INLINE void store(float* p, vfloat a) { std::memcpy(p, &a, sizeof a); }
LML_INLINE void store(double* p, vdouble a) { std::memcpy(p, &a, sizeof a); }

LML_INLINE ifloat load_bits(const void* p) {
  vhalf h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (ifloat)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, ifloat);
#endif
}
LML_INLINE void store_bits(void* p, ifloat bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
  const vhalf h = __builtin_convertvector(bits, vhalf);
#endif
  std::memcpy(p, &h, sizeof h);
}

LML_INLINE vfloat load(const bfloat16* p) { return cast_bits<vfloat>(load_bits(p) << 16); }
LML_INLINE void store(bfloat16* p, vfloat a) {
  const ifloat bits = cast_bits<ifloat>(a);
  const ifloat rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  store_bits(p, a != a ? ifloat{} + 0x7fc0 : rounded);
}

LML_INLINE vfloat load(const float16* p) {
#if defined(__AVX512F__)
  __m256i h;
  std::memcpy(&h, p, sizeof h);
  return (vfloat)_mm512_cvtph_ps(h);
#elif defined(__F16C__)
  __m128i h;
  std::memcpy(&h, p, sizeof h);
  return (vfloat)_mm256_cvtph_ps(h);
#else
  const ifloat bits = load_bits(p);
  const ifloat magnitude = (bits & 0x7fff) << 13;
  // Scaling by 2^112 corrects the exponent bias and handles subnormals at the same time.
  const ifloat scaled = cast_bits<ifloat>(cast_bits<vfloat>(magnitude) * 0x1p112f);
  const ifloat value = (bits & 0x7c00) == 0x7c00 ? (magnitude | 0x7f800000) : scaled;
  return cast_bits<vfloat>(value | ((bits & 0x8000) << 16));
#endif
}
LML_INLINE void store(float16* p, vfloat a) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &h, sizeof h);
#elif defined(__F16C__)
  const __m128i h = _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &h, sizeof h);
#else
  const vfloat magnitude = vabs(a);
  const ifloat bits = cast_bits<ifloat>(magnitude);
  const ifloat normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10);
  // A float16 subnormal is a multiple of 2^-24, which is the last bit of a float in [0.5, 1).
  const ifloat subnormal = cast_bits<ifloat>(magnitude + 0.5f) - 0x3f000000;
  ifloat h = magnitude < 0x1p-14f ? subnormal : normal;
  h = magnitude >= 65520.0f ? ifloat{} + 0x7c00 : h;
  h = a != a ? ifloat{} + 0x7e00 : h;
  store_bits(p, h | ((cast_bits<ifloat>(a) >> 16) & 0x8000));
#endif
}

// Copies `count` entries (fewer than 2 * piece) in pieces of fixed size, which the compiler inlines. A call to memcpy
// would cost more than processing a short row.
template <int64_t piece, class S>
LML_INLINE void copy_part(S* to, const S* from, int64_t count) {
  if (count & piece) std::memcpy(to, from, piece * sizeof(S)), to += piece, from += piece;
  if constexpr (piece > 1) copy_part<piece / 2>(to, from, count);
}

// Loads the first `count` < lanes entries, padded with zeros.
template <class S>
LML_INLINE Vec<typename Work<S>::type> load_part(const S* p, int64_t count) {
  using T = typename Work<S>::type;
#if defined(__AVX512F__)
  [[maybe_unused]] const __mmask16 there = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(S) == 4) return (Vec<T>)_mm512_maskz_loadu_ps(there, p);
  if constexpr (sizeof(S) == 8) return (Vec<T>)_mm512_maskz_loadu_pd(static_cast<__mmask8>(there), p);
#elif defined(__AVX2__)
  if constexpr (sizeof(S) == 4) return (Vec<T>)_mm256_maskload_ps(p, (__m256i)first_lanes<T>(count));
  if constexpr (sizeof(S) == 8) return (Vec<T>)_mm256_maskload_pd(p, (__m256i)first_lanes<T>(count));
#endif
  S part[lanes<T>] = {};
  copy_part<lanes<T> / 2>(part, p, count);
  return load(part);
}
// Stores through a buffer, because masked stores are microcoded on some processors.
template <class S, class V>
LML_INLINE void store_part(S* p, V a, int64_t count) {
  using T = typename Work<S>::type;
  S part[lanes<T>];
  store(part, a);
  copy_part<lanes<T> / 2>(p, part, count);
}

// Loads booleans as a lane mask, padded with false.
template <class T>
LML_INLINE Mask<T> load_mask(const bool* p, int64_t count) {
  using Bytes = typename Lanes<T>::B;
  Bytes bytes{};
  if (count >= lanes<T>) {
    std::memcpy(&bytes, p, sizeof bytes);
  } else {
    copy_part<lanes<T> / 2>(reinterpret_cast<bool*>(&bytes), p, count);
  }
#if defined(__AVX2__)
  // GCC converts such short vectors entry by entry, so use the intrinsics.
  __m128i low{};
  std::memcpy(&low, &bytes, sizeof bytes);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return -(Mask<T>)_mm512_cvtepi8_epi32(low);
  if constexpr (sizeof(T) == 8) return -(Mask<T>)_mm512_cvtepi8_epi64(low);
#else
  if constexpr (sizeof(T) == 4) return -(Mask<T>)_mm256_cvtepi8_epi32(low);
  if constexpr (sizeof(T) == 8) return -(Mask<T>)_mm256_cvtepi8_epi64(low);
#endif
#endif
  return -__builtin_convertvector(bytes, Mask<T>);
}

template <class S>
LML_INLINE typename Work<S>::type load_one(const S* p) {
  if constexpr (sizeof(S) == sizeof(typename Work<S>::type)) {
    return *p;
  } else {
    return load_part(p, 1)[0];
  }
}
template <class S>
LML_INLINE void store_one(S* p, typename Work<S>::type a) {
  if constexpr (sizeof(S) == sizeof(a)) {
    *p = a;
  } else {
    store_part(p, splat(a), 1);
  }
}

}  // namespace
}  // namespace torchlml
