// The norms of one row. Statistics are in float. The quotient is rounded to the element type before it is multiplied by
// the weight, unless the weight is float and the elements are not.

#pragma once

#include "vec.h"

namespace {

// Returns the sum of f over a row. f takes and returns sixteen elements.
template <typename T, typename F>
float sum_over(const T *x, int64_t n, F f) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums += f(load(x + i));
  float result = sum(sums);
  for (; i < n; ++i) result += f(splat(to_float(x[i])))[0];
  return result;
}

template <typename T, typename W>
void scale_row(T *out, const T *x, const W *weight, int64_t n, float mean, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float normed = (to_float(x[i]) - mean) * factor;
    if (sizeof(W) == sizeof(T)) normed = rounded<T>(normed);
    store(normed * to_float(weight[i]), out + i);
  }
}

template <typename T, typename W>
void rms_norm_row(T *out, const T *x, const W *weight, int64_t n, float eps) {
  const float squares = sum_over(x, n, [](Vec v) { return v * v; });
  scale_row(out, x, weight, n, 0.0f, 1.0f / std::sqrt(squares / n + eps));
}

// With a bias (not null), only the result is rounded.
template <typename T, typename W>
void layer_norm_row(T *out, const T *x, const W *weight, const W *bias, int64_t n, float eps) {
  const float mean = sum_over(x, n, [](Vec v) { return v; }) / n;
  const float squares = sum_over(x, n, [mean](Vec v) { return (v - mean) * (v - mean); });
  const float factor = 1.0f / std::sqrt(squares / n + eps);
  if (bias == nullptr) return scale_row(out, x, weight, n, mean, factor);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i)
    store((to_float(x[i]) - mean) * factor * to_float(weight[i]) + to_float(bias[i]), out + i);
}

}  // namespace
