// y = x W^T + b for few rows of x. Every weight is read once, in row-major order, for all tokens of the step. Sums are
// in float. The order of an output's sum along K does not depend on the number of tokens, so the bits of a row do not
// depend on its batch.

#include <type_traits>

#include "pool.h"
#include "vec.h"

namespace {

// Fewer multiplications than this run in one thread: they take a few us, as long as waking another thread. Measured
// with the linears of a small model, with weights in the L3 cache.
constexpr int64_t ALONE = int64_t{1} << 16;

// Computes sixteen partial sums for each of COLS tokens and ROWS rows of W.
template <int ROWS, int COLS, typename T>
void add_products(Vec (&result)[COLS * ROWS], const T *w, const T *x, int64_t x_stride, int64_t k) {
  Vec sums[COLS * ROWS] = {};
  const auto step = [&](auto load_at) {
    Vec rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) rows[r] = load_at(w + r * k);
    UNROLL for (int c = 0; c < COLS; ++c) {
      const Vec column = load_at(x + c * x_stride);
      UNROLL for (int r = 0; r < ROWS; ++r) sums[c * ROWS + r] += rows[r] * column;
    }
  };
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) step([i](const T *place) { return load(place + i); });
  if (i < k) step([i, k](const T *place) { return load_some(place + i, k - i); });
  UNROLL for (int j = 0; j < COLS * ROWS; ++j) result[j] = sums[j];
}

#if defined(__AVX512BF16__)
// The same with AVX512-BF16: one instruction adds two products. It treats denormal numbers as zero.
template <int ROWS, int COLS>
void add_pairs(Vec (&result)[COLS * ROWS], const BFloat16 *w, const BFloat16 *x, int64_t x_stride, int64_t k) {
  __m512 sums[COLS * ROWS] = {};
  const auto step = [&](int64_t i, __mmask32 mask) {
    __m512bh rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) rows[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + r * k + i);
    UNROLL for (int c = 0; c < COLS; ++c) {
      const __m512bh column = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + c * x_stride + i);
      UNROLL for (int r = 0; r < ROWS; ++r)
        sums[c * ROWS + r] = _mm512_dpbf16_ps(sums[c * ROWS + r], rows[r], column);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) step(i, ~__mmask32{0});
  if (i < k) step(i, (__mmask32{1} << (k - i)) - 1);
  UNROLL for (int j = 0; j < COLS * ROWS; ++j) result[j] = (Vec)sums[j];
}
#endif

template <typename T>
struct Linear {
  T *out;
  const T *x, *w, *bias;
  int64_t x_stride, tokens, n, k;

  template <int ROWS, int COLS>
  void tile(int64_t row, int64_t token) const {
    Vec sums[COLS * ROWS];
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>)
      add_pairs<ROWS, COLS>(sums, w + row * k, x + token * x_stride, x_stride, k);
    else
#endif
      add_products<ROWS, COLS>(sums, w + row * k, x + token * x_stride, x_stride, k);
    const Vec totals = sums_of<COLS * ROWS>(sums);
    for (int c = 0; c < COLS; ++c)
      for (int r = 0; r < ROWS; ++r) {
        const float total = totals[c * ROWS + r];
        store(bias ? total + to_float(bias[row + r]) : total, out + (token + c) * n + row + r);
      }
  }

  // Rows [begin, end) of W for all tokens, in tiles of four by four sums, which fit into the registers with their
  // operands.
  void rows(int64_t begin, int64_t end) const {
    int64_t row = begin;
    if (tokens == 1)
      for (; row + 8 <= end; row += 8) tile<8, 1>(row, 0);
    for (; row + 4 <= end; row += 4) {
      int64_t token = 0;
      for (; token + 4 <= tokens; token += 4) tile<4, 4>(row, token);
      for (; token < tokens; ++token) tile<4, 1>(row, token);
    }
    for (; row < end; ++row)
      for (int64_t token = 0; token < tokens; ++token) tile<1, 1>(row, token);
  }

  void run() const {
    parallel_for(n, 16, n * k * tokens > ALONE, [&](int64_t begin, int64_t end) { rows(begin, end); });
  }
};

}  // namespace

#define LINEAR(T, SUFFIX)                                                                                             \
  extern "C" void linear_##SUFFIX(T *out, const T *x, int64_t x_stride, const T *w, const T *bias, int64_t tokens,    \
                                  int64_t n, int64_t k) {                                                             \
    Linear<T>{out, x, w, bias, x_stride, tokens, n, k}.run();                                                         \
  }

FOR_EACH_DTYPE(LINEAR)
