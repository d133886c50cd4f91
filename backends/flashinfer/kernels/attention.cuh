// Definitions that the attention kernels share: a call as the loader passes it, compile-time constants, and tiles.
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
// A query sees this many positions before its own; -1: all.
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
  int32_t* work;  // scratch of `ingot_work_words` words
  cudaStream_t stream;
  int32_t tokens;
  int32_t sequences;
  int32_t width;  // of the page table
  int32_t pages;  // of the cache
};

__host__ __device__ constexpr int cdiv(int left, int right) { return (left + right - 1) / right; }

// The least tile of tensor cores has 16 rows. Sequences that fill at most one such tile (their tokens times the heads
// of a group) decode in a step that also has prefill. They would leave most rows of a larger tile empty.
constexpr int kFewRows = 16;
constexpr int kFewTokens = kGroup < kFewRows ? kFewRows / kGroup : 1;

// The sequences that a launch computes: those with `least` to `most` tokens in the step.
struct Range {
  int least, most;

  __device__ int tokens_of(const Call& call, int sequence) const {
    const int count = __ldg(call.q_lens + sequence);
    return count >= least && count <= most ? count : 0;
  }
};

// How a launch cuts rows into tiles of `rows` rows. A token takes `rows_per_token` of them.
struct Cut {
  int rows, rows_per_token;
};

// Returns the most tiles of a step. Each sequence, of at least `least` tokens, may fill its last tile only in part.
inline int most_tiles(int tokens, int sequences, int least, Cut cut) {
  const int parts = tokens / least < sequences ? tokens / least : sequences;
  return cdiv(tokens * cut.rows_per_token, cut.rows) + parts;
}

// The sequences and tiles of one launch, and its scratch:
// - count: the number of tiles
// - taken: the number of work items that blocks have taken
// - kv_heads: the cache heads of one pass
// - sequences, indices: for each tile, up to `most`, its sequence and its index in the sequence
// - zeros: a zero for each tile
// - pages: for each sequence, the begin of its pages in the table
// - valid: for each tile up to `most`, whether it exists
struct Part {
  Range range;
  Cut cut;
  int most;
  int32_t *count, *taken, *kv_heads, *sequences, *indices, *zeros, *pages;
  bool* valid;

  Part(Range range, Cut cut, int most, int32_t* at, int in_step)
      : range(range),
        cut(cut),
        most(most),
        count(at),
        taken(at + 1),
        kv_heads(at + 2),
        sequences(at + 3),
        indices(sequences + most),
        zeros(indices + most),
        pages(zeros + most),
        valid(reinterpret_cast<bool*>(pages + in_step + 1)) {}
};

inline int64_t work_words(int most, int sequences) {
  return 3 + 3 * int64_t(most) + sequences + 1 + cdiv(most, sizeof(int32_t));
}

// Attention of sequences of many tokens, in fa2.cu or fa3.cu: the setup before the first launch, the cut of its tiles,
// and the launch. FlashInfer's headers for the two cannot be included in one file.
cudaError_t prepare_many();
Cut cut_many();
cudaError_t launch_many(const Call& call, const Part& part);

}  // namespace ingot
