// Element types and vectors of sixteen floats, as vector types of the compiler. There are no torch headers, so the
// kernels build in seconds. They run on any x86-64; code for AVX-512 is guarded by its macros.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

// Unrolls short loops over vectors early, so that the compiler keeps their arrays in registers.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t LANES = 16;
typedef float Vec __attribute__((vector_size(64)));

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(_Float16 value) { return static_cast<float>(value); }
inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float value, float *place) { *place = value; }
inline void store(float value, _Float16 *place) { *place = static_cast<_Float16>(value); }
inline void store(float value, BFloat16 *place) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Rounds to nearest, ties to even. NaN stays NaN.
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  place->bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Returns `value` rounded to T, as float, for ops that round an intermediate value.
template <typename T>
inline float rounded(float value) {
  T narrow;
  store(value, &narrow);
  return to_float(narrow);
}

inline Vec splat(float value) { return Vec{} + value; }

inline Vec load(const float *place) {
  Vec result;
  std::memcpy(&result, place, sizeof result);
  return result;
}

inline Vec load(const BFloat16 *place) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  typedef uint32_t Full __attribute__((vector_size(64)));
  Half raw;
  std::memcpy(&raw, place, sizeof raw);
  const Full wide = __builtin_convertvector(raw, Full) << 16;
  Vec result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline Vec load(const _Float16 *place) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place)));
#elif defined(__F16C__)
  Vec result;
  for (int half = 0; half < 2; ++half) {
    const __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place) + half));
    std::memcpy(reinterpret_cast<char *>(&result) + half * sizeof part, &part, sizeof part);
  }
  return result;
#else
  Vec result;
  for (int64_t i = 0; i < LANES; ++i) result[i] = to_float(place[i]);
  return result;
#endif
}

// Loads the first `count` of sixteen elements, and zeros after them.
template <typename T>
inline Vec load_some(const T *place, int64_t count) {
  T padded[LANES] = {};
  std::memcpy(padded, place, count * sizeof(T));
  return load(padded);
}

// Adds lanes of `a` and of `b` in pairs, D lanes apart. The result holds D of a's sums, D of b's, and so on.
template <int D, size_t... LANE>
inline Vec add_apart(Vec a, Vec b, std::index_sequence<LANE...>) {
#define FROM(LANE) (LANE) / (2 * D) * (2 * D) + (LANE) % D + ((LANE) / D % 2 ? LANES : 0)
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (FROM(LANE))...) + __builtin_shufflevector(a, b, (FROM(LANE) + D)...);
#else  // GCC before 12
  typedef int32_t Lanes __attribute__((vector_size(64)));
  return __builtin_shuffle(a, b, Lanes{(FROM(LANE))...}) + __builtin_shuffle(a, b, Lanes{(FROM(LANE) + D)...});
#endif
#undef FROM
}

// Returns the sum of values[i] in lane i, for N vectors, a power of two up to 16. Each sum is a tree over adjacent
// lanes, so it does not depend on N or on loop unrolling.
template <int N, int D = 1>
inline Vec sums_of(const Vec *values) {
  if constexpr (D == LANES) {
    return values[0];
  } else {
    constexpr int LEFT = N > 1 ? N / 2 : 1;
    Vec halves[LEFT];
    for (int i = 0; i < LEFT; ++i)
      halves[i] = add_apart<D>(values[2 * i % N], values[(2 * i + 1) % N], std::make_index_sequence<LANES>{});
    return sums_of<LEFT, 2 * D>(halves);
  }
}

inline float sum(Vec value) { return sums_of<1>(&value)[0]; }

// Returns exp(x) by the range reduction and polynomial of Cephes' expf (netlib.org/cephes, single/expf.c), within 2
// ulp. Below -87.3, where exp is denormal, the result is 0; above 88.7 it is infinite.
inline float fast_exp(float x) {
  const float bounded = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float whole = std::nearbyintf(bounded * 1.44269504088896341f);
  const float r = std::fma(whole, 2.12194440e-4f, std::fma(whole, -0.693359375f, bounded));
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  const float result = p * scale;
  const float high = x > 88.7f ? std::numeric_limits<float>::infinity() : (x != x ? x : result);
  return x < -87.3f ? 0.0f : high;
}

}  // namespace

// Defines one function per element type, with the suffixes of `SUFFIXES` in calls/kernels.py.
#define FOR_EACH_DTYPE(DEFINE) \
  DEFINE(float, f32)           \
  DEFINE(_Float16, f16)        \
  DEFINE(BFloat16, bf16)
