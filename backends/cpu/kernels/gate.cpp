// silu_mul and gelu_mul: an activation of the gate times the other half, rounded once. activate: the activation alone.

#include "vec.h"

namespace {

// x * sigmoid(x). For very negative x, exp(-x) overflows to infinity, and the quotient is 0, which is right.
inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

// arXiv 1606.08415, section 2, with 0.5 (1 + tanh y) written as sigmoid(2 y), which avoids cancellation. 0.7978845608
// is sqrt(2 / pi).
inline float gelu_tanh(float x) {
  const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + fast_exp(-2.0f * y));
}

inline float gelu_erf(float x) { return 0.5f * x * std::erfc(x * -0.7071067811865476f); }

// NaN stays NaN.
inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

inline float relu_squared(float x) { return relu(x) * relu(x); }

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

template <float (*ACTIVATION)(float), typename T>
void gate_mul(T *out, const T *gate, const T *up, int64_t tokens, int64_t n, int64_t gate_stride, int64_t up_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T *a = gate + t * gate_stride, *b = up + t * up_stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(ACTIVATION(to_float(a[i])) * to_float(b[i]), out + t * n + i);
  }
}

template <float (*ACTIVATION)(float), typename T>
void activate(T *out, const T *x, int64_t tokens, int64_t n, int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T *row = x + t * stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(ACTIVATION(to_float(row[i])), out + t * n + i);
  }
}

}  // namespace

#define ACTIVATE(NAME, T, ACTIVATION)                                                                               \
  extern "C" void NAME(T *out, const T *x, int64_t tokens, int64_t n, int64_t stride) {                             \
    activate<ACTIVATION>(out, x, tokens, n, stride);                                                                \
  }
#define GATE(NAME, T, ACTIVATION)                                                                                   \
  extern "C" void NAME(T *out, const T *gate, const T *up, int64_t tokens, int64_t n, int64_t gate_stride,          \
                       int64_t up_stride) {                                                                         \
    gate_mul<ACTIVATION>(out, gate, up, tokens, n, gate_stride, up_stride);                                         \
  }
#define GATES(T, SUFFIX)                        \
  GATE(silu_mul_##SUFFIX, T, silu)              \
  GATE(gelu_mul_tanh_##SUFFIX, T, gelu_tanh)    \
  GATE(gelu_mul_none_##SUFFIX, T, gelu_erf)     \
  ACTIVATE(gelu_tanh_##SUFFIX, T, gelu_tanh)    \
  ACTIVATE(gelu_##SUFFIX, T, gelu_erf)          \
  ACTIVATE(relu_##SUFFIX, T, relu)              \
  ACTIVATE(relu_squared_##SUFFIX, T, relu_squared) \
  ACTIVATE(sigmoid_##SUFFIX, T, sigmoid)

FOR_EACH_DTYPE(GATES)
