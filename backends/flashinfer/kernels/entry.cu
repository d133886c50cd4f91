// The functions of a library. Sequences of few tokens are computed beside those of many, on a stream of their own:
// what they read of the cache takes as long whichever way they are computed, and needs few multiprocessors' arithmetic.
#include <exception>
#include <string>

#include "fa2.cuh"

namespace ingot {

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

// Each sequence has as many tiles as the heads of a group take, whatever the step has.
int few_tiles(int sequences) { return sequences * cdiv(kFewTokens * kGroup, kFewRows); }

// A second stream, and what orders it with that of the step.
struct Side {
  cudaStream_t stream{};
  cudaEvent_t begin{}, end{};
} side;

// Once in a process, which has one GPU; so that no step does it.
cudaError_t prepare() {
  if (side.stream) return cudaSuccess;
  for (cudaEvent_t* event : {&side.begin, &side.end})
    if (cudaError_t status = cudaEventCreateWithFlags(event, cudaEventDisableTiming)) return status;
  if (cudaError_t status = prepare_many()) return status;
  return cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking);
}

cudaError_t launch(const Call& call) {
  clear_unowned<<<call.tokens < 128 ? call.tokens : 128, 128, 0, call.stream>>>(call);
  if (cudaError_t status = cudaGetLastError()) return status;
  constexpr int kAny = 1 << 30;
  if (call.sequences == 1) return launch_many(call, {1, kAny});  // there is nothing beside it
  if (cudaError_t status = cudaEventRecord(side.begin, call.stream)) return status;
  if (cudaError_t status = cudaStreamWaitEvent(side.stream, side.begin, 0)) return status;
  int32_t* scratch = call.work + work_words_many(call.tokens, call.sequences);
  const Range few{1, kFewTokens}, many{kFewTokens + 1, kAny};
  if (cudaError_t status = fa2::launch<kFewRows>(call, few, few_tiles(call.sequences), scratch, side.stream))
    return status;
  if (cudaError_t status = cudaEventRecord(side.end, side.stream)) return status;
  if (cudaError_t status = launch_many(call, many)) return status;
  return cudaStreamWaitEvent(call.stream, side.end, 0);
}

}  // namespace ingot

#define INGOT_EXPORT extern "C" __attribute__((visibility("default")))

// How many numbers of scratch a step needs. No GPU is asked.
INGOT_EXPORT int64_t ingot_work_words(int32_t tokens, int32_t sequences) {
  return ingot::work_words_many(tokens, sequences) + ingot::fa2::work_words(ingot::few_tiles(sequences), sequences);
}

// What the other two give: null, or what went wrong.
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
