// The begin and end of a step: positions and slots of its tokens, greedy sampling, and the rows' state for the next
// step. It is a few integers per sequence. The many small tensor ops of the references would cost more than some
// layers.

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "vec.h"

namespace {

struct Best {
  float value;
  int32_t place;
};

// Returns the largest element of a row and its first index; the index is -1 if it is infinite or any element is NaN.
Best best_of(const float *row, int64_t n) {
  float most = -std::numeric_limits<float>::infinity();
  int strange = 0;
#pragma omp simd reduction(max : most) reduction(| : strange)
  for (int64_t i = 0; i < n; ++i) {
    most = row[i] > most ? row[i] : most;
    strange |= row[i] != row[i];
  }
  if (strange || std::isinf(most)) return {most, -1};
  return {most, static_cast<int32_t>(std::find(row, row + n, most) - row)};
}

}  // namespace

extern "C" void greedy(int32_t *tokens, const float *logits, int64_t rows, int64_t vocab) {
  parallel_for(rows, 1, rows * vocab > (int64_t{1} << 18), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) tokens[row] = best_of(logits + row * vocab, vocab).place;
  });
}

extern "C" void feed(int32_t *ids, int32_t *positions, int64_t *slots, int32_t *kv_lens, const int32_t *tokens,
                     const int32_t *token_seqs, const int32_t *q_starts, const int32_t *q_lens, const int32_t *rows,
                     const int32_t *starts, const int32_t *page_table, const int32_t *last_token,
                     const int32_t *position, int64_t count, int64_t sequences, int64_t width, int64_t page) {
  const auto begin = [&](int64_t b) { return starts[b] >= 0 ? starts[b] : position[std::max(rows[b], 0)]; };
  for (int64_t t = 0; t < count; ++t) {
    const int64_t b = token_seqs[t];
    if (b < 0) {  // padding
      ids[t] = positions[t] = 0;
      slots[t] = -1;
      continue;
    }
    positions[t] = begin(b) + static_cast<int32_t>(t) - q_starts[b];
    ids[t] = std::max(tokens[t] >= 0 ? tokens[t] : last_token[std::max(rows[b], 0)], 0);
    slots[t] = page_table ? page_table[b * width + positions[t] / page] * page + positions[t] % page : -1;
  }
  for (int64_t b = 0; b < sequences; ++b) kv_lens[b] = rows[b] >= 0 ? begin(b) + q_lens[b] : 0;
}

extern "C" void advance(int32_t *last_token, int32_t *position, const int32_t *rows, const int32_t *kv_lens,
                        const int32_t *sampled, const int32_t *sample_index, const int32_t *rejected,
                        int64_t sequences) {
  for (int64_t b = 0; b < sequences; ++b) {
    if (rows[b] < 0) continue;  // padding
    const int32_t back = rejected ? rejected[b] : 0;
    position[rows[b]] = kv_lens[b] - back;
    if (sample_index[b] >= 0 && sample_index[b] - back >= 0) last_token[rows[b]] = sampled[sample_index[b] - back];
  }
}
