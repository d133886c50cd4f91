// rms_norm, layer_norm and add_rms_norm, one row at a time.

#include "norm.h"

namespace {

// The rows of a [tokens, heads, dim] tensor, which is dense along dim.
struct Rows {
  int64_t tokens, heads, dim, token_stride, head_stride;
};

// Calls `row` for each row with its offset into the weight. With `weight_stride` 0 the heads share one weight.
template <typename T, typename F>
void norm(T *out, const T *x, const Rows &rows, int64_t weight_stride, F row) {
  for (int64_t t = 0; t < rows.tokens; ++t)
    for (int64_t h = 0; h < rows.heads; ++h)
      row(out + (t * rows.heads + h) * rows.dim, x + t * rows.token_stride + h * rows.head_stride, h * weight_stride);
}

template <typename T, typename W>
void add_rms_norm(T *out, T *sums, const T *x, const T *residual, const W *weight, int64_t tokens, int64_t dim,
                  int64_t x_stride, int64_t residual_stride, float eps) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T *a = x + t * x_stride, *b = residual + t * residual_stride;
    T *both = sums + t * dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) store(to_float(a[i]) + to_float(b[i]), both + i);
    rms_norm_row(out + t * dim, both, weight, dim, eps);
  }
}

}  // namespace

#define NORMS(T, SUFFIX, W, WEIGHT)                                                                                 \
  extern "C" void rms_norm_##SUFFIX##_##WEIGHT(T *out, const T *x, const W *weight, int64_t tokens, int64_t heads,  \
                                               int64_t dim, int64_t token_stride, int64_t head_stride,              \
                                               int64_t weight_stride, double eps) {                                 \
    const Rows rows = {tokens, heads, dim, token_stride, head_stride};                                              \
    norm(out, x, rows, weight_stride, [=](T *to, const T *row, int64_t at) {                                        \
      rms_norm_row(to, row, weight + at, dim, static_cast<float>(eps));                                             \
    });                                                                                                             \
  }                                                                                                                 \
  extern "C" void layer_norm_##SUFFIX##_##WEIGHT(T *out, const T *x, const W *weight, const W *bias,                \
                                                 int64_t tokens, int64_t heads, int64_t dim, int64_t token_stride,  \
                                                 int64_t head_stride, int64_t weight_stride, double eps) {          \
    const Rows rows = {tokens, heads, dim, token_stride, head_stride};                                              \
    norm(out, x, rows, weight_stride, [=](T *to, const T *row, int64_t at) {                                        \
      layer_norm_row(to, row, weight + at, bias == nullptr ? nullptr : bias + at, dim, static_cast<float>(eps));    \
    });                                                                                                             \
  }                                                                                                                 \
  extern "C" void add_rms_norm_##SUFFIX##_##WEIGHT(T *out, T *sums, const T *x, const T *residual, const W *weight, \
                                                   int64_t tokens, int64_t dim, int64_t x_stride,                   \
                                                   int64_t residual_stride, double eps) {                           \
    add_rms_norm(out, sums, x, residual, weight, tokens, dim, x_stride, residual_stride, static_cast<float>(eps));  \
  }

#define OWN_WEIGHT(T, SUFFIX) NORMS(T, SUFFIX, T, SUFFIX)
FOR_EACH_DTYPE(OWN_WEIGHT)
NORMS(_Float16, f16, float, f32)
NORMS(BFloat16, bf16, float, f32)
