// What the attention kernels share: a call as the loader passes it, what is known at compile time, and tiles.
//
// The compile side defines, from the types of a call: INGOT_HEADS, INGOT_KV_HEADS, INGOT_DIM, INGOT_PAGE, INGOT_SCALE,
// INGOT_WINDOW (-1: none), INGOT_SOFT_CAP (0: none), INGOT_Q_TOKEN and INGOT_Q_HEAD (strides of q, in elements), and
// INGOT_BF16 or INGOT_F16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ingot {

// Strides of a cache [pages, 2, page, kv_heads, dim], in elements.
constexpr int64_t kSlotStride = int64_t(INGOT_KV_HEADS) * INGOT_DIM;
constexpr int64_t kPartStride = INGOT_PAGE * kSlotStride;
constexpr int64_t kPageStride = 2 * kPartStride;
constexpr int kGroup = INGOT_HEADS / INGOT_KV_HEADS;
constexpr bool kHasWindow = INGOT_WINDOW >= 0;
// A query sees this many positions in front of its own; -1: all.
constexpr int kWindowLeft = kHasWindow ? INGOT_WINDOW - 1 : -1;
constexpr bool kHasSoftCap = INGOT_SOFT_CAP > 0;

// The loader's ctypes.Structure has the same fields in the same order.
struct Call {
  void* out;
  void* kv;
  void* q;
  int32_t* page_table;
  int32_t* q_starts;
  int32_t* q_lens;
  int32_t* kv_lens;
  int32_t* work;  // scratch of `ingot_work_words` numbers
  cudaStream_t stream;
  int32_t tokens;
  int32_t sequences;
  int32_t width;  // of the page table
};

__host__ __device__ constexpr int cdiv(int left, int right) { return (left + right - 1) / right; }

// The least tile of tensor cores has 16 rows. Sequences whose tokens, times the heads of a group, fill no more are
// decoding beside a prompt: tiles of many rows would be empty but for these.
constexpr int kFewRows = 16;
constexpr int kFewTokens = kGroup < kFewRows ? kFewRows / kGroup : 1;

// The sequences that a launch computes: those of so many tokens in the step.
struct Range {
  int least, most;

  __device__ int tokens_of(const Call& call, int sequence) const {
    const int count = __ldg(call.q_lens + sequence);
    return count >= least && count <= most ? count : 0;
  }
};

// The most tiles that the tokens of a step fall into: each sequence of at least `least` fills its last one in part.
inline int most_tiles(int tokens, int sequences, int least, int rows, int rows_per_token) {
  const int parts = tokens / least < sequences ? tokens / least : sequences;
  return cdiv(tokens * rows_per_token, rows) + parts;
}

// The `item`th tile of all, counted from the last one down: later tiles of a sequence see more, and long work begins
// first. A token takes `rows_per_token` of the `rows` of a tile. The sequence is -1 where there are fewer tiles.
struct Tile {
  int sequence;
  int index;
};

__device__ inline Tile tile_of(const Call& call, Range range, int item, int rows, int rows_per_token) {
  for (int b = call.sequences - 1; b >= 0; --b) {
    const int tiles = cdiv(range.tokens_of(call, b) * rows_per_token, rows);
    if (item < tiles) return {b, tiles - 1 - item};
    item -= tiles;
  }
  return {-1, 0};
}

// Attention of sequences of many tokens, what is done once before it, and its scratch: fa2.cu or fa3.cu. Headers of
// FlashInfer for the one cannot be included beside those for the other.
cudaError_t prepare_many();
cudaError_t launch_many(const Call& call, Range range);
int64_t work_words_many(int tokens, int sequences);

}  // namespace ingot
