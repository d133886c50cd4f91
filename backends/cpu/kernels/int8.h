// Elements of caches in int8: whole numbers from -127 to 127.

#pragma once

#include "vec.h"

namespace {

struct Int8 {
  int8_t value;
};

constexpr float INT8_MOST = 127.0f;

inline float highest(Int8) { return INT8_MOST; }

inline Vec load(const Int8 *place) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  Bytes raw;
  std::memcpy(&raw, place, sizeof raw);
  return __builtin_convertvector(raw, Vec);
}

// Saturates, then rounds to nearest, ties to even. NaN becomes 0: comparisons with NaN are false.
inline void store(float value, Int8 *place) {
  const float bounded = value < -INT8_MOST ? -INT8_MOST : (value > INT8_MOST ? INT8_MOST : value);
  place->value = static_cast<int8_t>(bounded == bounded ? std::nearbyintf(bounded) : 0.0f);
}

}  // namespace
