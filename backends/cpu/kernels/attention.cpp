// Attention over a paged KV cache, one token and one kv head at a time.
//
// The caller passes the strides of pages, positions and heads of the cache (ir/cache/form.py), and the offset of a
// value from its key.

#include <algorithm>
#include <vector>

#include "cached.h"
#include "pool.h"

namespace {

struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, page;
  int64_t q_head, page_stride, slot_stride, head_stride, value_offset;  // in elements
  float scale, soft_cap;  // soft_cap 0: none; `scale` includes the k_scale of the cache
  float v_scale;
  int64_t mask, size;     // the index of the kind in `KINDS` of ir/masks.py, and its size
  int64_t key_scale_at, value_scale_at;  // bytes from a key to its scale and that of its value, or NO_SCALE
};

enum Mask : int64_t { CAUSAL, WINDOW, CHUNKED, BIDIRECTIONAL, BLOCK_CAUSAL };

// Returns the first position that a query sees.
inline int64_t first_seen(const Shape &shape, int64_t position) {
  switch (shape.mask) {
    case WINDOW: return std::max<int64_t>(0, position - shape.size + 1);
    case CHUNKED: return position / shape.size * shape.size;
    default: return 0;
  }
}

// Returns the position after the last one that a query sees, in a sequence of `length` positions.
inline int64_t end_seen(const Shape &shape, int64_t position, int64_t length) {
  switch (shape.mask) {
    case BIDIRECTIONAL: return length;
    case BLOCK_CAUSAL: return std::min(length, (position / shape.size + 1) * shape.size);
    default: return position + 1;
  }
}

inline int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

// Returns the floats of scratch of one task: queries and results, padded with zeros; peaks and sums of the softmax.
inline int64_t scratch_size(const Shape &shape) {
  return shape.heads / shape.kv_heads * (padded(shape.key_dim) + padded(shape.value_dim) + 2);
}

// Calls f(offset, load) for every sixteen elements of a head. The last load stops at `dim`.
template <typename F>
void each_lanes(int64_t dim, F f) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) f(d, [](const auto *place) { return load(place); });
  if (d < dim) f(d, [rest = dim - d](const auto *place) { return load_some(place, rest); });
}

// Returns the scores of a query with up to sixteen keys, `row` elements apart. Lanes from `count` on repeat the last
// key, so that the loop over keys has one length; their scores are not used.
template <typename T>
Vec scores_of(const float *query, const T *keys, int64_t row, int64_t count, int64_t dim) {
  Vec sums[LANES] = {};
  const T *places[LANES];
  for (int64_t i = 0; i < LANES; ++i) places[i] = keys + std::min(i, count - 1) * row;
  each_lanes(dim, [&](int64_t d, auto load_at) {
    const Vec q = load(query + d);
    UNROLL for (int64_t i = 0; i < LANES; ++i) sums[i] += q * load_at(places[i] + d);
  });
  return sums_of<LANES>(sums);
}

// Computes attention of the query heads that share one kv head, for one token at `position` of `length`. The online
// softmax corrects its state block by block, so the context may have any length. `lse`, unless null, takes the
// log-sum-exp of each head.
template <typename T, typename C>
void attend(const Shape &shape, const T *query, const C *cache, const int32_t *table, int64_t position, int64_t length,
            int64_t kv_head, const T *sinks, const float *slopes, T *out, float *lse, float *scratch) {
  const int64_t group = shape.heads / shape.kv_heads, dim = shape.key_dim, width = padded(dim);
  const int64_t value_dim = shape.value_dim, value_width = padded(value_dim);
  const int64_t first = first_seen(shape, position), end = end_seen(shape, position, length);
  const int64_t row = shape.slot_stride;
  float *q = scratch, *sums = q + group * width, *peak = sums + group * value_width, *total = peak + group;
  std::fill(scratch, scratch + scratch_size(shape), 0.0f);
  std::fill(peak, peak + group, -std::numeric_limits<float>::infinity());
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d)
      q[g * width + d] = to_float(query[(kv_head * group + g) * shape.q_head + d]) * shape.scale;
  for (int64_t begin = first, count; begin < end; begin += count) {
    const int64_t page = begin / shape.page, place = begin % shape.page;
    count = std::min({LANES, shape.page - place, end - begin});
    const C *keys = cache + table[page] * shape.page_stride + place * row + kv_head * shape.head_stride;
    const C *values = keys + shape.value_offset;
    for (int64_t g = 0; g < group; ++g) {
      const Vec scores = scores_of(q + g * width, keys, row, count, dim);
      float weights[LANES];
      std::memcpy(weights, &scores, sizeof weights);
      if (shape.key_scale_at != NO_SCALE)
        for (int64_t i = 0; i < count; ++i) weights[i] *= scale_after(keys + i * row, shape.key_scale_at);
      if (shape.soft_cap != 0.0f)
        for (int64_t i = 0; i < count; ++i) weights[i] = std::tanh(weights[i] / shape.soft_cap) * shape.soft_cap;
      if (slopes) {
        const float slope = slopes[kv_head * group + g];
        for (int64_t i = 0; i < count; ++i) weights[i] += slope * static_cast<float>(begin + i - position);
      }
      float highest = peak[g];
      for (int64_t i = 0; i < count; ++i) highest = weights[i] > highest ? weights[i] : highest;  // a NaN shows in total
      const float shrink = fast_exp(peak[g] - highest);
#pragma omp simd
      for (int64_t i = 0; i < LANES; ++i) weights[i] = fast_exp(weights[i] - highest);
      peak[g] = highest;
      total[g] *= shrink;
      for (int64_t i = 0; i < count; ++i) total[g] += weights[i];
      if (shape.value_scale_at != NO_SCALE)
        for (int64_t i = 0; i < count; ++i) weights[i] *= scale_after(keys + i * row, shape.value_scale_at);
      each_lanes(value_dim, [&](int64_t d, auto load_at) {
        Vec sum = load(sums + g * value_width + d) * splat(shrink);
        for (int64_t i = 0; i < count; ++i) sum += splat(weights[i]) * load_at(values + i * row + d);
        std::memcpy(sums + g * value_width + d, &sum, sizeof sum);
      });
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    const int64_t head = kv_head * group + g;
    if (first >= end) {  // the token sees no cached position
      for (int64_t d = 0; d < value_dim; ++d) store(0.0f, out + head * value_dim + d);
      if (lse) lse[head] = sinks ? to_float(sinks[head]) : -std::numeric_limits<float>::infinity();
      continue;
    }
    float all = total[g];
    if (sinks) all += fast_exp(to_float(sinks[head]) - peak[g]);
    for (int64_t d = 0; d < value_dim; ++d)
      store(sums[g * value_width + d] / all * shape.v_scale, out + head * value_dim + d);
    if (lse) lse[head] = peak[g] + std::log(all);
  }
}

template <typename T, typename C>
void paged_attention(T *out, float *lse, const T *q, int64_t q_stride, const C *cache, const int32_t *page_table,
                     int64_t table_width, const int32_t *q_starts, const int32_t *q_lens, const int32_t *kv_lens,
                     int64_t sequences, const T *sinks, const float *slopes, const Shape &shape) {
  // One task is one token and one kv head. A sequence of length 0 is padding.
  std::vector<int64_t> first(sequences + 1, 0);
  for (int64_t b = 0; b < sequences; ++b) first[b + 1] = first[b] + q_lens[b];
  const int64_t tasks = first[sequences] * shape.kv_heads;
  int64_t work = 0;
  for (int64_t b = 0; b < sequences; ++b) work += int64_t{q_lens[b]} * kv_lens[b] * shape.heads * shape.key_dim;
  // Waking another thread takes some microseconds, about as long as this many multiplications.
  const bool parallel = work > 200000;
  parallel_for(tasks, 1, parallel, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(scratch_size(shape));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t token = task / shape.kv_heads, kv_head = task % shape.kv_heads;
      const int64_t b = std::upper_bound(first.begin(), first.end(), token) - first.begin() - 1;
      const int64_t place = token - first[b], row = q_starts[b] + place;
      attend(shape, q + row * q_stride, cache, page_table + b * table_width, int64_t{kv_lens[b]} - q_lens[b] + place,
             kv_lens[b], kv_head, sinks, slopes, out + row * shape.heads * shape.value_dim,
             lse ? lse + row * shape.heads : nullptr, scratch.data());
    }
  });
}

}  // namespace

#define PAGED_ATTENTION_OVER(T, SUFFIX, C)                                                                                    \
  extern "C" void paged_attention_##SUFFIX(                                                                            \
      T *out, float *lse, const T *q, int64_t q_stride, const C *cache, const int32_t *page_table, int64_t table_width,\
      const int32_t *q_starts, const int32_t *q_lens, const int32_t *kv_lens, int64_t sequences, const T *sinks,       \
      const float *slopes, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t page, int64_t q_head,               \
      int64_t page_stride, int64_t slot_stride, int64_t head_stride, int64_t value_offset, double scale, int64_t mask, \
      int64_t size, double soft_cap, double v_scale, int64_t key_scale_at, int64_t value_scale_at) {                   \
    const Shape shape{heads, kv_heads, key_dim, value_dim, page, q_head, page_stride, slot_stride, head_stride,        \
                      value_offset, static_cast<float>(scale), static_cast<float>(soft_cap),                           \
                      static_cast<float>(v_scale), mask, size, key_scale_at, value_scale_at};                          \
    paged_attention(out, lse, q, q_stride, cache, page_table, table_width, q_starts, q_lens, kv_lens, sequences,       \
                    sinks, slopes, shape);                                                                               \
  }

#define PAGED_ATTENTION(T, SUFFIX)          \
  PAGED_ATTENTION_OVER(T, SUFFIX, T)        \
  FOR_EACH_NARROW(PAGED_ATTENTION_OVER, T, SUFFIX)

FOR_EACH_DTYPE(PAGED_ATTENTION)
