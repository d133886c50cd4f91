// How keys and values are written to a KV cache, by its element type (ir/cache/dtype.py).

#pragma once

#include "float8.h"
#include "int8.h"

namespace {

// Writes `count` keys or values to a cache. With a cache of their dtype it copies; only caches of eight bits have
// scales.
template <typename T>
inline void put(T *place, const T *x, int64_t count, float) {
  std::memcpy(place, x, count * sizeof(T));
}

template <typename T, typename C>
inline void put(C *place, const T *x, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) store(to_float(x[i]) / scale, place + i);
}

}  // namespace

// Defines one function per element type of caches of eight bits, with the suffixes of `NARROW` in calls/kernels.py.
#define FOR_EACH_NARROW(DEFINE, T, SUFFIX) \
  DEFINE(T, SUFFIX##_f8, Float8)           \
  DEFINE(T, SUFFIX##_i8, Int8)
