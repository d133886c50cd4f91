// Weights of quantized linears as they are stored: row-major codes of eight or four bits, and a scale for each row or
// group of columns. `Quantized` describes one weight; `decode` turns a run of a row into floats.

#pragma once

#include <vector>

#include "vec.h"

namespace {

// Types of elements, in the order of `ELEMENTS` in calls/quant.py.
enum Element : int64_t { I8, U8, I4, U4, F4E2M1, IQ4NL };
// Dtypes of scales, in the order of `SCALES` there.
enum ScaleType : int64_t { SCALE_F32, SCALE_F16, SCALE_BF16, SCALE_F8E8M0 };

// The numbers of four-bit codes: two's complement with offset 8, unsigned, OCP's e2m1, and llama.cpp's iq4nl. All are
// exact in bfloat16.
constexpr float FOUR_BITS[][16] = {
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
};

// A weight [n, k]. A row has `groups` scales, each for `group` columns; with `one_scale` all rows share those of the
// first. A number is (element - zero) * scale. Without `zeros` the zero points are 0.
struct Quantized {
  Element element;
  ScaleType scale_type;
  bool one_scale;
  const uint8_t *codes;
  const void *scales;
  const uint8_t *zeros;
  int64_t n, k, group;

  bool bytes() const { return element == I8 || element == U8; }
  int64_t groups() const { return (k + group - 1) / group; }
  int64_t row_bytes() const { return bytes() ? k : (k + 1) / 2; }
  const uint8_t *row(int64_t row) const { return codes + row * row_bytes(); }
  const float *table() const { return FOUR_BITS[element - I4]; }
  int64_t place(int64_t row, int64_t group) const { return (one_scale ? 0 : row * groups()) + group; }

  float scale(int64_t row, int64_t group) const {
    const int64_t i = place(row, group);
    switch (scale_type) {
      case SCALE_F32:
        return static_cast<const float *>(scales)[i];
      case SCALE_F16:
        return to_float(static_cast<const _Float16 *>(scales)[i]);
      case SCALE_BF16:
        return to_float(static_cast<const BFloat16 *>(scales)[i]);
      default:  // a power of two, 2^-127 to 2^127, or NaN
        const uint8_t code = static_cast<const uint8_t *>(scales)[i];
        return code == 0xFF ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
    }
  }
  float zero(int64_t row, int64_t group) const { return zeros ? zeros[place(row, group)] : 0.0f; }

  // Writes the numbers of columns [begin, end) of a row. `begin` is even.
  void decode(int64_t r, int64_t begin, int64_t end, float *out) const {
    const uint8_t *codes = row(r);
    for (int64_t i = begin; i < end;) {
      const int64_t g = i / group, stop = (g + 1) * group < end ? (g + 1) * group : end;
      const float factor = scale(r, g), shift = zero(r, g);
      if (element == I8)
        for (; i < stop; ++i) *out++ = (static_cast<float>(static_cast<int8_t>(codes[i])) - shift) * factor;
      else if (element == U8)
        for (; i < stop; ++i) *out++ = (static_cast<float>(codes[i]) - shift) * factor;
      else
        i = decode_nibbles(codes, i, stop, shift, factor, out);
    }
  }

 private:
  // The same for four-bit codes of one group, which begin at the first of a byte. Returns `stop` and moves `out`.
  int64_t decode_nibbles(const uint8_t *codes, int64_t i, int64_t stop, float shift, float factor, float *&out) const {
    float numbers[16];
    for (int code = 0; code < 16; ++code) numbers[code] = (table()[code] - shift) * factor;
    for (; i + 2 <= stop; i += 2, out += 2) {
      const uint8_t pair = codes[i / 2];
      out[0] = numbers[pair & 15];
      out[1] = numbers[pair >> 4];
    }
    if (i < stop) *out++ = numbers[codes[i / 2] & 15];
    return stop;
  }
};

}  // namespace
