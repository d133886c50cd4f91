// Attention over a paged KV cache, a token and a kv head at a time.
//
// A cache is [pages, 2, page, kv_heads, head_dim], row-major: keys at index 0 of the second axis, values at 1.

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

template <typename T>
float dot(const float *a, const T *b, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * to_float(b[i]);
  return sum;
}

struct Shape {
  int64_t heads, kv_heads, head_dim, page;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

// Attention of the query heads that share one kv head, for one token at `position`, by a softmax that is corrected
// page by page, so that the context may have any length.
template <typename T>
void attend(const Shape &shape, const T *query, const T *cache, const int32_t *table, int64_t position, int64_t kv_head,
            const T *sinks, T *out, float *scratch) {
  const int64_t group = shape.heads / shape.kv_heads, dim = shape.head_dim;
  const int64_t first = shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
  const int64_t row = shape.kv_heads * dim, half = shape.page * row;
  float *q = scratch, *sum = q + group * dim, *scores = sum + group * dim;
  std::vector<float> peak(group, -std::numeric_limits<float>::infinity()), total(group, 0.0f);
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) {
      q[g * dim + d] = to_float(query[(kv_head * group + g) * dim + d]) * shape.scale;
      sum[g * dim + d] = 0.0f;
    }
  for (int64_t begin = first / shape.page * shape.page; begin <= position; begin += shape.page) {
    const T *keys = cache + static_cast<int64_t>(table[begin / shape.page]) * 2 * half + kv_head * dim;
    const T *values = keys + half;
    const int64_t from = std::max<int64_t>(first - begin, 0), to = std::min(position - begin + 1, shape.page);
    for (int64_t g = 0; g < group; ++g) {
      float highest = peak[g];
      for (int64_t i = from; i < to; ++i) {
        float score = dot(q + g * dim, keys + i * row, dim);
        if (shape.soft_cap != 0.0f) score = std::tanh(score / shape.soft_cap) * shape.soft_cap;
        scores[i] = score;
        highest = score > highest || std::isnan(score) ? score : highest;
      }
      const float shrink = std::exp(peak[g] - highest);
      float *acc = sum + g * dim;
      if (shrink != 1.0f) {
        total[g] *= shrink;
        for (int64_t d = 0; d < dim; ++d) acc[d] *= shrink;
      }
      peak[g] = highest;
      for (int64_t i = from; i < to; ++i) {
        const float weight = std::exp(scores[i] - highest);
        total[g] += weight;
        const T *value = values + i * row;
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) acc[d] += weight * to_float(value[d]);
      }
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float all = total[g];
    if (sinks) all += std::exp(to_float(sinks[kv_head * group + g]) - peak[g]);
    for (int64_t d = 0; d < dim; ++d) store(sum[g * dim + d] / all, out + (kv_head * group + g) * dim + d);
  }
}

template <typename T>
void paged_attention(T *out, const T *q, int64_t q_stride, const T *cache, const int32_t *page_table, int64_t table_width,
                     const int32_t *q_starts, const int32_t *q_lens, const int32_t *kv_lens, int64_t sequences,
                     const T *sinks, const Shape &shape) {
  // One task is one token and one kv head. A sequence of length 0 is padding.
  std::vector<int64_t> first(sequences + 1, 0);
  for (int64_t b = 0; b < sequences; ++b) first[b + 1] = first[b] + q_lens[b];
  const int64_t tasks = first[sequences] * shape.kv_heads;
  const int64_t group = shape.heads / shape.kv_heads;
  int64_t work = 0;
  for (int64_t b = 0; b < sequences; ++b) work += int64_t{q_lens[b]} * kv_lens[b] * shape.heads * shape.head_dim;
  // Waking another thread takes some microseconds: as long as about this many multiplications.
  const bool parallel = work > 200000;
  parallel_for(tasks, 1, parallel, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * group * shape.head_dim + shape.page);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t token = task / shape.kv_heads, kv_head = task % shape.kv_heads;
      const int64_t b = std::upper_bound(first.begin(), first.end(), token) - first.begin() - 1;
      const int64_t place = token - first[b], row = q_starts[b] + place;
      attend(shape, q + row * q_stride, cache, page_table + b * table_width, int64_t{kv_lens[b]} - q_lens[b] + place,
             kv_head, sinks, out + row * shape.heads * shape.head_dim, scratch.data());
    }
  });
}

}  // namespace

#define PAGED_ATTENTION(T, SUFFIX)                                                                                     \
  extern "C" void paged_attention_##SUFFIX(                                                                            \
      T *out, const T *q, int64_t q_stride, const T *cache, const int32_t *page_table, int64_t table_width,            \
      const int32_t *q_starts, const int32_t *q_lens, const int32_t *kv_lens, int64_t sequences, const T *sinks,       \
      int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t page, double scale, int64_t window,                   \
      double soft_cap) {                                                                                               \
    const Shape shape{heads, kv_heads, head_dim, page, static_cast<float>(scale), static_cast<float>(soft_cap), window}; \
    paged_attention(out, q, q_stride, cache, page_table, table_width, q_starts, q_lens, kv_lens, sequences, sinks,     \
                    shape);                                                                                            \
  }

FOR_EACH_DTYPE(PAGED_ATTENTION)
