// The functions of a library. Sequences of few tokens run at the same time as those of many, on a second stream: their
// time is the time to read the cache, and they need the arithmetic of few multiprocessors.
#include <cub/block/block_scan.cuh>
#include <exception>
#include <string>

#include "fa2.cuh"

namespace ingot {

constexpr int kThreads = 512;
constexpr int kClearing = 128;  // most blocks that clear unowned rows
// Bytes of keys and values that stay in the L2 cache while blocks read them at the same time: FlashAttention-3 assumes
// 32 of an H100's 50 MB (hopper/tile_scheduler.hpp).
constexpr int64_t kCached = int64_t(32) << 20;

// Returns the number of cache heads of a pass, at least one: as many as fit into the L2 cache with their keys and values
// of so many positions. It divides the number of all heads, so that all passes are equal.
__device__ int heads_of_pass(int64_t positions) {
  const int64_t bytes = positions * 2 * INGOT_DIM * 2;  // of keys and values, of 2 bytes an element
  int heads = INGOT_KV_HEADS;
  while (heads > 1 && (heads * bytes > kCached || INGOT_KV_HEADS % heads)) heads--;
  return heads;
}

// Lists the tiles of a part, with all threads of a block. Tiles that see most keys come first, so that long ones begin
// first.
__device__ void list_tiles(const Call& call, const Part& part) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int positions;
  extern __shared__ int4 shared[];
  int* const seen = reinterpret_cast<int*>(shared);  // keys that each tile sees, with tiles in the order of sequences
  int* const ends = seen + cdiv(part.most, 4) * 4;   // the end of each sequence's tiles in `seen`
  const auto tiles_of = [&](int b) {
    return cdiv(part.range.tokens_of(call, b) * part.cut.rows_per_token, part.cut.rows);
  };
  if (threadIdx.x == 0) positions = 0;
  int count = 0;
  for (int done = 0; done < call.sequences; done += kThreads) {
    const int b = done + threadIdx.x;
    const int tiles = b < call.sequences ? tiles_of(b) : 0;
    int end, all;
    __syncthreads();
    Scan(scan).InclusiveSum(tiles, end, all);
    if (b < call.sequences) ends[b] = count + end;
    if (tiles) atomicAdd(&positions, call.kv_lens[b]);
    count += all;
  }
  for (int i = count + threadIdx.x; i < cdiv(count, 4) * 4; i += kThreads) seen[i] = -1;
  __syncthreads();

  const auto tile_of = [&](int i) {  // returns the tile's sequence, and its index in the sequence
    int low = 0, high = call.sequences - 1;
    while (low < high) {  // the first sequence with its end after tile i
      const int middle = (low + high) / 2;
      if (ends[middle] > i)
        high = middle;
      else
        low = middle + 1;
    }
    return int2{low, i - (low ? ends[low - 1] : 0)};
  };
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int2 tile = tile_of(i);
    const int tokens = call.q_lens[tile.x], last = (tile.y + 1) * part.cut.rows / part.cut.rows_per_token;
    seen[i] = call.kv_lens[tile.x] - tokens + min(last, tokens);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int2 tile = tile_of(i);
    const int mine = seen[i];
    int place = 0;  // the number of tiles before this one
    for (int four = 0; four < cdiv(count, 4); four++) {
      const int4 other = shared[four];
      const int at = four * 4;
      place += (other.x > mine || (other.x == mine && at < i)) + (other.y > mine || (other.y == mine && at + 1 < i)) +
               (other.z > mine || (other.z == mine && at + 2 < i)) + (other.w > mine || (other.w == mine && at + 3 < i));
    }
    part.sequences[place] = tile.x;
    part.indices[place] = tile.y;
  }
  for (int i = threadIdx.x; i < part.most; i += kThreads) {
    part.zeros[i] = 0;
    part.valid[i] = i < count;
    if (i >= count) part.sequences[i] = part.indices[i] = 0;
  }
  for (int b = threadIdx.x; b <= call.sequences; b += kThreads) part.pages[b] = b * call.width;
  if (threadIdx.x == 0) {
    *part.count = count;
    *part.taken = 0;
    *part.kv_heads = heads_of_pass(positions);
  }
}

// Writes zeros to rows that no sequence owns. If every row is owned, all blocks end at once.
__device__ void clear_unowned(const Call& call, int block, int blocks) {
  __shared__ int owned, mine;
  if (threadIdx.x == 0) owned = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < call.sequences; b += kThreads)
    if (const int count = call.q_lens[b]) atomicAdd(&owned, count);
  __syncthreads();
  if (owned == call.tokens) return;
  constexpr int kVectors = INGOT_HEADS * INGOT_DIM / 8;  // of 8 elements of 2 bytes
  for (int row = block; row < call.tokens; row += blocks) {
    if (threadIdx.x == 0) mine = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < call.sequences; b += kThreads) {
      const int place = row - call.q_starts[b];
      if (place >= 0 && place < call.q_lens[b]) mine = 1;
    }
    __syncthreads();
    uint4* into = static_cast<uint4*>(call.out) + int64_t(row) * kVectors;
    for (int i = threadIdx.x; !mine && i < kVectors; i += kThreads) into[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
}

// One block for each part; the others clear rows that no sequence owns.
__global__ void __launch_bounds__(kThreads) prepare_step(Call call, Part many, Part few) {
  if (blockIdx.x == 0)
    list_tiles(call, many);
  else if (blockIdx.x == 1)
    list_tiles(call, few);
  else
    clear_unowned(call, int(blockIdx.x) - 2, int(gridDim.x) - 2);
}

constexpr Cut kFewCut{kFewRows, kGroup};

// Returns the tiles of the part of few tokens: for each sequence, as many as its most tokens and the heads of a group
// fill.
int few_tiles(int sequences) { return sequences * cdiv(kFewTokens * kGroup, kFewRows); }

int many_tiles(int tokens, int sequences, int least) { return most_tiles(tokens, sequences, least, cut_many()); }

// The second stream, and the events that order it with the stream of the step.
struct Side {
  cudaStream_t stream{};
  cudaEvent_t begin{}, end{};
} side;

// Creates the stream and the events, once in a process, which has one GPU, and before the first step.
cudaError_t prepare() {
  if (side.stream) return cudaSuccess;
  for (cudaEvent_t* event : {&side.begin, &side.end})
    if (cudaError_t status = cudaEventCreateWithFlags(event, cudaEventDisableTiming)) return status;
  if (cudaError_t status = prepare_many()) return status;
  return cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking);
}

cudaError_t launch(const Call& call) {
  // A step with one sequence runs one launch, even if the sequence has few tokens.
  const bool alone = call.sequences == 1;
  constexpr int kAny = 1 << 30;
  const Range few_range{1, kFewTokens}, many_range{alone ? 1 : kFewTokens + 1, kAny};
  const int tiles = many_tiles(call.tokens, call.sequences, many_range.least);
  const Part many(many_range, cut_many(), tiles, call.work, call.sequences);
  const Part few(few_range, kFewCut, few_tiles(call.sequences), call.work + work_words(tiles, call.sequences),
                 call.sequences);
  const int shared = (cdiv(max(many.most, few.most), 4) * 4 + call.sequences) * sizeof(int);
  prepare_step<<<2 + min(call.tokens, kClearing), kThreads, shared, call.stream>>>(call, many, few);
  if (cudaError_t status = cudaGetLastError()) return status;
  if (alone) return launch_many(call, many);
  if (cudaError_t status = cudaEventRecord(side.begin, call.stream)) return status;
  if (cudaError_t status = cudaStreamWaitEvent(side.stream, side.begin, 0)) return status;
  if (cudaError_t status = fa2::launch<kFewRows>(call, few, side.stream)) return status;
  if (cudaError_t status = cudaEventRecord(side.end, side.stream)) return status;
  if (cudaError_t status = launch_many(call, many)) return status;
  return cudaStreamWaitEvent(call.stream, side.end, 0);
}

}  // namespace ingot

#define INGOT_EXPORT extern "C" __attribute__((visibility("default")))

// Returns the words of scratch that a step needs, without a GPU.
INGOT_EXPORT int64_t ingot_work_words(int32_t tokens, int32_t sequences) {
  return ingot::work_words(ingot::many_tiles(tokens, sequences, 1), sequences) +
         ingot::work_words(ingot::few_tiles(sequences), sequences);
}

// Runs `work`, and returns null or the message of its error.
template <typename Work>
static const char* problem(Work work) {
  static thread_local std::string error;
  try {
    const cudaError_t status = work();
    if (status == cudaSuccess) return nullptr;
    error = cudaGetErrorString(status);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  return error.c_str();
}

INGOT_EXPORT const char* ingot_prepare() { return problem(ingot::prepare); }

INGOT_EXPORT const char* ingot_attention(const ingot::Call* call) {
  return problem([call] { return ingot::launch(*call); });
}
