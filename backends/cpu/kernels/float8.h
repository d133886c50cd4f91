// Elements of caches in f8e4m3: a sign, four bits of exponent with bias 7, three bits of mantissa (OCP 8-bit floating
// point, arXiv 2209.05433). There are no infinities; all ones after the sign are NaN. The conversions do not depend on
// the processor's mode for denormal numbers.

#pragma once

#include "vec.h"

namespace {

struct Float8 {
  uint8_t bits;
};

constexpr uint32_t FLOAT8_MOST = 0x43E00000;  // 448 as float

inline float highest(Float8) { return 448.0f; }

inline Vec load(const Float8 *place) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  Bytes raw;
  std::memcpy(&raw, place, sizeof raw);
  const Words wide = __builtin_convertvector(raw, Words), rest = wide & 0x7F;
  const Words normal = (rest << 20) + (120u << 23);  // the bias of float is 127
  const Vec small = __builtin_convertvector(rest, Vec) * (1.0f / 512);
  Words small_bits;
  std::memcpy(&small_bits, &small, sizeof small_bits);
  const Words is_small = (Words)(rest < 8), is_nan = (Words)(rest == 0x7F);
  const Words bits = (is_small & small_bits) | (~is_small & normal) | (is_nan & 0x7FC00000) | ((wide & 0x80) << 24);
  Vec result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Saturates, then rounds to nearest, ties to even. NaN stays NaN.
inline void store(float value, Float8 *place) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 31 << 7;
  bits &= 0x7FFFFFFF;
  uint32_t code;
  if (bits > 0x7F800000) {
    code = 0x7F;
  } else if (bits < 0x3C800000) {  // below 2^-6 numbers are denormal, in steps of 2^-9
    float size;
    std::memcpy(&size, &bits, sizeof size);
    code = static_cast<uint32_t>(std::nearbyintf(size * 512.0f));
  } else {
    if (bits > FLOAT8_MOST) bits = FLOAT8_MOST;
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  }
  place->bits = static_cast<uint8_t>(sign | code);
}

}  // namespace
