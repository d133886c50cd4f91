// What both attention kernels share: a call as the loader passes it, what is known at compile time, and the rows that
// belong to no sequence.
//
// The compile side defines, from the types of a call: INGOT_HEADS, INGOT_KV_HEADS, INGOT_DIM, INGOT_PAGE, INGOT_SCALE,
// INGOT_WINDOW (-1: none), INGOT_SOFT_CAP (0: none), INGOT_Q_TOKEN and INGOT_Q_HEAD (strides of q, in elements), and
// INGOT_BF16 or INGOT_F16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <string>

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

__host__ __device__ inline int cdiv(int left, int right) { return (left + right - 1) / right; }

// The most tiles that the tokens of a step fall into: each sequence fills its last one in part.
__host__ __device__ inline int most_tiles(int tokens, int sequences, int rows, int rows_per_token) {
  return cdiv(tokens * rows_per_token, rows) + sequences;
}

// The `item`th tile of all, counted from the last one down: later tiles of a sequence see more, and long work begins
// first. A token takes `rows_per_token` of the `rows` of a tile. The sequence is -1 where there are fewer tiles.
struct Tile {
  int sequence;
  int index;
};

__device__ inline Tile tile_of(const Call& call, int item, int rows, int rows_per_token) {
  for (int b = call.sequences - 1; b >= 0; --b) {
    const int tiles = cdiv(__ldg(call.q_lens + b) * rows_per_token, rows);
    if (item < tiles) return {b, tiles - 1 - item};
    item -= tiles;
  }
  return {-1, 0};
}

// Rows that no sequence owns come out zero. Where every row is owned, all blocks end at once.
__global__ void clear_unowned(Call call) {
  __shared__ int owned, mine;
  if (threadIdx.x == 0) owned = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < call.sequences; b += blockDim.x)
    if (const int count = call.q_lens[b]) atomicAdd(&owned, count);
  __syncthreads();
  if (owned == call.tokens) return;
  constexpr int kVectors = INGOT_HEADS * INGOT_DIM / 8;  // of 8 elements of 2 bytes
  for (int row = blockIdx.x; row < call.tokens; row += gridDim.x) {
    if (threadIdx.x == 0) mine = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < call.sequences; b += blockDim.x) {
      const int place = row - call.q_starts[b];
      if (place >= 0 && place < call.q_lens[b]) mine = 1;
    }
    __syncthreads();
    uint4* into = static_cast<uint4*>(call.out) + int64_t(row) * kVectors;
    for (int i = threadIdx.x; !mine && i < kVectors; i += blockDim.x) into[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
}

cudaError_t launch(const Call& call);
int64_t work_words(int tokens, int sequences);

}  // namespace ingot

#define INGOT_EXPORT extern "C" __attribute__((visibility("default")))

// How many numbers of scratch a step needs. No GPU is asked.
INGOT_EXPORT int64_t ingot_work_words(int32_t tokens, int32_t sequences) {
  return ingot::work_words(tokens, sequences);
}

// Null, or why the call could not be launched.
INGOT_EXPORT const char* ingot_attention(const ingot::Call* call) {
  static thread_local std::string error;
  try {
    ingot::clear_unowned<<<call->tokens < 128 ? call->tokens : 128, 128, 0, call->stream>>>(*call);
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess) status = ingot::launch(*call);
    if (status == cudaSuccess) return nullptr;
    error = cudaGetErrorString(status);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  return error.c_str();
}
