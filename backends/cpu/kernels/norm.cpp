// rms_norm, layer_norm and add_rms_norm, a row at a time.

#include "norm.h"

namespace {

// Rows are the last axis of a [tokens, heads, dim] tensor, dense there.
struct Rows {
  int64_t tokens, heads, dim, token_stride, head_stride;
};

// A weight of `weight_stride` 0 is shared by the heads.
template <typename T, typename W, void (*ROW)(T *, const T *, const W *, int64_t, float)>
void norm(T *out, const T *x, const W *weight, const Rows &rows, int64_t weight_stride, float eps) {
  for (int64_t t = 0; t < rows.tokens; ++t)
    for (int64_t h = 0; h < rows.heads; ++h)
      ROW(out + (t * rows.heads + h) * rows.dim, x + t * rows.token_stride + h * rows.head_stride,
          weight + h * weight_stride, rows.dim, eps);
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

#define NORM(NAME, ROW, T, W)                                                                                   \
  extern "C" void NAME(T *out, const T *x, const W *weight, int64_t tokens, int64_t heads, int64_t dim,         \
                       int64_t token_stride, int64_t head_stride, int64_t weight_stride, double eps) {          \
    norm<T, W, ROW<T, W>>(out, x, weight, {tokens, heads, dim, token_stride, head_stride}, weight_stride,       \
                          static_cast<float>(eps));                                                             \
  }

#define NORMS(T, SUFFIX, W, WEIGHT)                                                                                 \
  NORM(rms_norm_##SUFFIX##_##WEIGHT, rms_norm_row, T, W)                                                            \
  NORM(layer_norm_##SUFFIX##_##WEIGHT, layer_norm_row, T, W)                                                        \
  extern "C" void add_rms_norm_##SUFFIX##_##WEIGHT(T *out, T *sums, const T *x, const T *residual, const W *weight, \
                                                   int64_t tokens, int64_t dim, int64_t x_stride,                   \
                                                   int64_t residual_stride, double eps) {                           \
    add_rms_norm(out, sums, x, residual, weight, tokens, dim, x_stride, residual_stride, static_cast<float>(eps));  \
  }

#define OWN_WEIGHT(T, SUFFIX) NORMS(T, SUFFIX, T, SUFFIX)
FOR_EACH_DTYPE(OWN_WEIGHT)
NORMS(_Float16, f16, float, f32)
NORMS(BFloat16, bf16, float, f32)
