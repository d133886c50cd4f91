// How keys and values are written to a KV cache, by its element type (ir/cache/dtype.py).

#pragma once

#include <type_traits>

#include "float8.h"
#include "int8.h"

namespace {

// The scale of a row that has no scale of its own.
constexpr int64_t NO_SCALE = -1;

template <typename T>
constexpr bool is_narrow() {
  return std::is_same_v<T, Float8> || std::is_same_v<T, Int8>;
}

// Returns the scale of a key or value in a cache with scales per token: the largest magnitude divided by the largest
// number of C. It is at least the smallest normal number, and NaN if the row has NaN or infinity.
template <typename C, typename T>
inline float row_scale(const T *x, int64_t count) {
  float most = 0.0f, odd = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::fabs(to_float(x[i]));
    most = value > most ? value : most;
    odd += value - value;  // 0, or NaN for NaN and infinity
  }
  const float scale = most / highest(C{});
  return (scale < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : scale) + odd;
}

// Writes `count` keys or values to a cache. With a cache of their dtype it copies. A cache of eight bits has scales:
// `scale`, or, unless `scale_at` is NO_SCALE, one that is computed here and stored `scale_at` bytes after `place`.
template <typename C, typename T>
inline void put(C *place, const T *x, int64_t count, float scale, int64_t scale_at) {
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(place, x, count * sizeof(T));
  } else {
    static_assert(is_narrow<C>());
    if (scale_at != NO_SCALE) {
      scale = row_scale<C>(x, count);
      std::memcpy(reinterpret_cast<char *>(place) + scale_at, &scale, sizeof scale);
    }
    for (int64_t i = 0; i < count; ++i) store(to_float(x[i]) / scale, place + i);
  }
}

// Returns the float that is stored `bytes` after an element of a cache: its scale.
template <typename C>
inline float scale_after(const C *place, int64_t bytes) {
  float scale;
  std::memcpy(&scale, reinterpret_cast<const char *>(place) + bytes, sizeof scale);
  return scale;
}

}  // namespace

// Defines one function per element type of caches of eight bits, with the suffixes of `NARROW` in calls/kernels.py.
#define FOR_EACH_NARROW(DEFINE, T, SUFFIX) \
  DEFINE(T, SUFFIX##_f8, Float8)           \
  DEFINE(T, SUFFIX##_i8, Int8)
