// y = x W^T + b for a quantized W. The codes of a weight are read once from memory, and become numbers in registers or
// in the L1 cache. The order of an output's sum along K does not depend on the number of tokens, so the bits of a row do
// not depend on its batch.
//
// With AVX512-BF16, codes become bfloat16 without rounding, since all of them are exact in it. Products are added in
// float, and scales multiply the sum of a row or group. Else codes are scaled in float, as the reference does.

#include "quant.h"

#include <type_traits>

#include "pool.h"
#include "quant_bf16.h"

namespace {

constexpr int64_t ALONE = int64_t{1} << 16;  // as in linear.cpp
// Rows that are decoded together, and columns of a block of them: 16 kB of floats, half of an L1 cache.
constexpr int64_t ROWS = 4, BLOCK = 1024;
// Tokens for which a row is decoded once. Their sums take 16 kB, and their columns of a block fit into an L2 cache.
constexpr int64_t TOKENS = 64;

template <typename T>
struct QuantLinear {
  T *out;
  const T *x, *bias;
  int64_t x_stride, tokens;
  Quantized w;

  void finish(float total, int64_t row, int64_t token) const {
    store(bias ? total + to_float(bias[row]) : total, out + token * w.n + row);
  }

  // Adds the products of COLS tokens with `ROWS` decoded rows to sums[token][row].
  template <int COLS>
  void add(Vec (*sums)[ROWS], const float (*rows)[BLOCK], const T *x, int64_t count) const {
    Vec totals[COLS][ROWS];
    UNROLL for (int c = 0; c < COLS; ++c)
      UNROLL for (int r = 0; r < ROWS; ++r) totals[c][r] = sums[c][r];
    for (int64_t i = 0; i < count; i += LANES)
      UNROLL for (int c = 0; c < COLS; ++c) {
        const T *place = x + c * x_stride + i;
        const Vec column = i + LANES <= count ? load(place) : load_some(place, count - i);
        UNROLL for (int r = 0; r < ROWS; ++r) totals[c][r] += load(rows[r] + i) * column;
      }
    UNROLL for (int c = 0; c < COLS; ++c)
      UNROLL for (int r = 0; r < ROWS; ++r) sums[c][r] = totals[c][r];
  }

  // Rows [row, row + count) for up to TOKENS tokens from `token` on. `count` is at most ROWS.
  void tile(int64_t row, int64_t count, int64_t token, int64_t some) const {
    alignas(64) float rows[ROWS][BLOCK] = {};
    Vec sums[TOKENS][ROWS];
    std::memset(sums, 0, some * sizeof sums[0]);
    for (int64_t begin = 0; begin < w.k; begin += BLOCK) {
      const int64_t size = begin + BLOCK < w.k ? BLOCK : w.k - begin;
      for (int64_t r = 0; r < count; ++r) {
        w.decode(row + r, begin, begin + size, rows[r]);
        for (int64_t i = size; i % LANES; ++i) rows[r][i] = 0;
      }
      const T *columns = x + token * x_stride + begin;
      int64_t t = 0;
      for (; t + 4 <= some; t += 4) add<4>(sums + t, rows, columns + t * x_stride, size);
      for (; t < some; ++t) add<1>(sums + t, rows, columns + t * x_stride, size);
    }
    for (int64_t t = 0; t < some; ++t) {
      const Vec totals = sums_of<ROWS>(sums[t]);
      for (int64_t r = 0; r < count; ++r) finish(totals[r], row + r, token + t);
    }
  }

  void rows(int64_t begin, int64_t end, int64_t token, int64_t some) const {
    for (int64_t row = begin; row < end; row += ROWS)
      tile(row, row + ROWS < end ? ROWS : end - row, token, some);
  }

  void run() const {
#if defined(QUANT_BF16)
    if constexpr (std::is_same_v<T, BFloat16>) {
      run_bf16();
      return;
    }
#endif
    parallel(0, tokens);
  }

  void parallel(int64_t first, int64_t count) const {
    for (int64_t token = first; token < first + count; token += TOKENS) {
      const int64_t some = token + TOKENS < first + count ? TOKENS : first + count - token;
      parallel_for(w.n, 16, w.n * w.k * some > ALONE,
                   [&](int64_t begin, int64_t end) { rows(begin, end, token, some); });
    }
  }

#if defined(QUANT_BF16)
  void run_bf16() const {
    const bool split = w.groups() > 1;
    if (w.element == I8)
      split ? run_decoded<Bytes<false>, true>() : run_decoded<Bytes<false>, false>();
    else if (w.element == U8)
      split ? run_decoded<Bytes<true>, true>() : run_decoded<Bytes<true>, false>();
    else
      split ? run_decoded<Nibbles, true>() : run_decoded<Nibbles, false>();
  }

  template <typename Codes, bool GROUPED>
  void run_decoded() const {
    const Codes codes(w);
    thread_local Columns columns;
    // The tokens that are prepared at once, in up to 1 MB, which a core's L2 cache holds.
    const int64_t fitting = (int64_t{1} << 20) / (2 * w.k + 1);
    const int64_t most = fitting < 1 ? 1 : (fitting < TOKENS ? fitting : TOKENS);
    for (int64_t token = 0; token < tokens; token += most) {
      const int64_t some = token + most < tokens ? most : tokens - token;
      columns.prepare<Codes>(w, x + token * x_stride, x_stride, some);
      const Product<Codes, GROUPED> product{w, codes, columns};
      parallel_for(w.n, 16, w.n * w.k * some > ALONE, [&](int64_t begin, int64_t end) {
        product.rows(begin, end, some, [&](float total, int64_t row, int64_t t) { finish(total, row, token + t); });
      });
      for (int64_t t = 0; t < some; ++t)
        if (!columns.finite(t)) parallel(token + t, 1);
    }
  }
#endif
};

}  // namespace

// `format` is what does not depend on the weight: the columns of a group (0: all), the element type, the dtype of scales,
// and whether all rows share their scales.
#define QUANT_LINEAR(T, SUFFIX)                                                                                       \
  extern "C" void quant_linear_##SUFFIX(T *out, const T *x, int64_t x_stride, const uint8_t *codes,                   \
                                        const void *scales, const uint8_t *zeros, const T *bias, int64_t tokens,      \
                                        int64_t n, int64_t k, const int64_t *format) {                                \
    const Quantized w{static_cast<Element>(format[1]), static_cast<ScaleType>(format[2]), format[3] != 0, codes,      \
                      scales, zeros, n, k, format[0] > 0 ? format[0] : k};                                            \
    QuantLinear<T>{out, x, bias, x_stride, tokens, w}.run();                                                          \
  }

FOR_EACH_DTYPE(QUANT_LINEAR)
