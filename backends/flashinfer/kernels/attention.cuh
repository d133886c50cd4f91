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
  int32_t pages;  // of the cache
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

// How a launch cuts rows into tiles: a token takes `rows_per_token` of the `rows` of one.
struct Cut {
  int rows, rows_per_token;
};

// The most tiles that the tokens of a step fall into: each sequence of at least `least` fills its last one in part.
inline int most_tiles(int tokens, int sequences, int least, Cut cut) {
  const int parts = tokens / least < sequences ? tokens / least : sequences;
  return cdiv(tokens * cut.rows_per_token, cut.rows) + parts;
}

// What one launch computes, and its scratch: how many tiles there are, how many items of them were taken by blocks, and
// the heads of the cache that are gone through together; of each tile, up to `most`, the sequence and its index in there;
// a zero for each; where each sequence's pages begin in the table; whether there is such a tile.
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

// Attention of sequences of many tokens: fa2.cu or fa3.cu; what is done once before it, and the cut of its tiles. Headers
// of FlashInfer for the one cannot be included beside those for the other.
cudaError_t prepare_many();
Cut cut_many();
cudaError_t launch_many(const Call& call, const Part& part);

}  // namespace ingot
