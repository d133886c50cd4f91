// Rotary embedding, alone and fused with the q/k norm and the cache write; and the cache write alone.

#include <type_traits>
#include <vector>

#include "cached.h"
#include "norm.h"

namespace {

// Rotates heads. A table row is `rotary` / 2 cosines, then as many sines. Elements from `rotary` on are copied.
struct Turn {
  const float *table;
  int64_t rotary, dim;
  bool interleaved;

  template <typename T>
  void row(T *out, const T *x, int64_t position) const {
    const int64_t half = rotary / 2;
    const float *cos = table + position * rotary, *sin = cos + half;
    if (interleaved) {
      for (int64_t i = 0; i < half; ++i) pair(out, x, cos[i], sin[i], 2 * i, 2 * i + 1);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) pair(out, x, cos[i], sin[i], i, i + half);
    }
    for (int64_t i = rotary; i < dim; ++i) out[i] = x[i];
  }

  template <typename T>
  static void pair(T *out, const T *x, float cos, float sin, int64_t a, int64_t b) {
    const float first = to_float(x[a]), second = to_float(x[b]);
    store(first * cos - second * sin, out + a);
    store(second * cos + first * sin, out + b);
  }
};

// The heads of a [tokens, heads, dim] tensor, which is dense along dim.
template <typename T>
struct Heads {
  const T *data;
  int64_t heads, token_stride, head_stride;

  const T *at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

template <typename T>
void rope(T *out, const Heads<T> &x, const int32_t *positions, int64_t tokens, const Turn &turn) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < x.heads; ++h) turn.row(out + (t * x.heads + h) * turn.dim, x.at(t, h), positions[t]);
}

// Returns the row of a slot's keys in a cache [pages, 2, page, kv_heads, row]; its values are `page` rows later.
inline int64_t row_of(int64_t slot, int64_t page) { return slot / page * 2 * page + slot % page; }

template <typename T, typename C>
void qk_norm_rope_append(T *out, C *cache, const Heads<T> &q, const Heads<T> &k, const Heads<T> &v,
                         const int32_t *positions, const int64_t *slots, const T *q_weight, const T *k_weight,
                         int64_t tokens, int64_t page, int64_t row, const Turn &turn, float eps, bool norm_last,
                         float k_scale, float v_scale, int64_t scale_at) {
  const int64_t dim = turn.dim;
  std::vector<T> scratch(dim), wide(dim);
  const auto turned = [&](T *place, const T *x, const T *weight, int64_t position) {
    if (weight && norm_last) {
      turn.row(scratch.data(), x, position);
      rms_norm_row(place, scratch.data(), weight, dim, eps);
      return;
    }
    if (weight) rms_norm_row(scratch.data(), x, weight, dim, eps);
    turn.row(place, weight ? scratch.data() : x, position);
  };
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < q.heads; ++h) turned(out + (t * q.heads + h) * dim, q.at(t, h), q_weight, positions[t]);
    if (slots[t] < 0) continue;  // padding
    C *keys = cache + row_of(slots[t], page) * k.heads * row, *values = keys + page * k.heads * row;
    for (int64_t h = 0; h < k.heads; ++h) {
      if constexpr (std::is_same_v<T, C>) {
        turned(keys + h * row, k.at(t, h), k_weight, positions[t]);
      } else {
        turned(wide.data(), k.at(t, h), k_weight, positions[t]);
        put(keys + h * row, wide.data(), dim, k_scale, scale_at);
      }
      put(values + h * row, v.at(t, h), dim, v_scale, scale_at);
    }
  }
}

}  // namespace

#define ROPE(T, SUFFIX)                                                                                              \
  extern "C" void rope_##SUFFIX(T *out, const T *x, const int32_t *positions, const float *table, int64_t tokens,    \
                                int64_t heads, int64_t dim, int64_t rotary, int64_t token_stride,                    \
                                int64_t head_stride, int64_t interleaved) {                                          \
    rope(out, Heads<T>{x, heads, token_stride, head_stride}, positions, tokens,                                      \
         Turn{table, rotary, dim, interleaved != 0});                                                                \
  }                                                                                                                  \
  APPEND(T, SUFFIX, T)                                                                                               \
  FOR_EACH_NARROW(APPEND, T, SUFFIX)

#define APPEND(T, SUFFIX, C)                                                                                         \
  extern "C" void qk_norm_rope_append_##SUFFIX(                                                                      \
      T *out, C *cache, const T *q, const T *k, const T *v, const int32_t *positions, const float *table,            \
      const int64_t *slots, const T *q_weight, const T *k_weight, int64_t tokens, int64_t heads, int64_t kv_heads,   \
      int64_t dim, int64_t rotary, int64_t page, int64_t row, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head,   \
      int64_t v_token, int64_t v_head, double eps, int64_t interleaved, int64_t norm_last, double k_scale,           \
      double v_scale, int64_t scale_at) {                                                                            \
    qk_norm_rope_append(out, cache, Heads<T>{q, heads, q_token, q_head}, Heads<T>{k, kv_heads, k_token, k_head},     \
                        Heads<T>{v, kv_heads, v_token, v_head}, positions, slots, q_weight, k_weight, tokens, page, row, \
                        Turn{table, rotary, dim, interleaved != 0}, static_cast<float>(eps), norm_last != 0,         \
                        static_cast<float>(k_scale), static_cast<float>(v_scale), scale_at);                         \
  }

FOR_EACH_DTYPE(ROPE)

// Copies the heads of k and v to their slots. A negative slot is padding, and v may be null. Sizes and strides are
// bytes.
extern "C" void kv_append(char *cache, const char *k, const char *v, const int64_t *slots, int64_t tokens, int64_t page,
                          int64_t heads, int64_t key_size, int64_t value_size, int64_t k_token, int64_t k_head,
                          int64_t v_token, int64_t v_head, int64_t page_stride, int64_t slot_stride,
                          int64_t head_stride, int64_t value_offset) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    char *row = cache + slots[t] / page * page_stride + slots[t] % page * slot_stride;
    for (int64_t h = 0; h < heads; ++h) {
      char *place = row + h * head_stride;
      std::memcpy(place, k + t * k_token + h * k_head, key_size);
      if (v) std::memcpy(place + value_offset, v + t * v_token + h * v_head, value_size);
    }
  }
}

// The same for a cache of eight bits: divides by a scale. Sizes and strides are elements.
#define NARROW_APPEND(T, SUFFIX, C)                                                                                    \
  extern "C" void kv_append_##SUFFIX(                                                                                  \
      C *cache, const T *k, const T *v, const int64_t *slots, int64_t tokens, int64_t page, int64_t heads,        \
      int64_t key_size, int64_t value_size, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,          \
      int64_t page_stride, int64_t slot_stride, int64_t head_stride, int64_t value_offset, double k_scale,             \
      double v_scale, int64_t key_scale_at, int64_t value_scale_at) {                                                  \
    for (int64_t t = 0; t < tokens; ++t) {                                                                             \
      if (slots[t] < 0) continue;                                                                                      \
      C *row = cache + slots[t] / page * page_stride + slots[t] % page * slot_stride;                             \
      for (int64_t h = 0; h < heads; ++h) {                                                                            \
        C *place = row + h * head_stride;                                                                         \
        put(place, k + t * k_token + h * k_head, key_size, static_cast<float>(k_scale), key_scale_at);                 \
        if (v)                                                                                                         \
          put(place + value_offset, v + t * v_token + h * v_head, value_size, static_cast<float>(v_scale),             \
              value_scale_at);                                                                                         \
      }                                                                                                                \
    }                                                                                                                  \
  }

#define NARROW_APPENDS(T, SUFFIX) FOR_EACH_NARROW(NARROW_APPEND, T, SUFFIX)

FOR_EACH_DTYPE(NARROW_APPENDS)
