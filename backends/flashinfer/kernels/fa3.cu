// Attention of sequences of many tokens with FlashAttention-3, only for GPUs of compute capability 9.0.
//
// FlashInfer plans a step on the host, with a list of tiles for each multiprocessor. Here the device lists the step's
// tiles, and the multiprocessors take one after the other.
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>

#include "attention.cuh"
#include "paged_mainloop.cuh"

namespace ingot {

#ifdef INGOT_BF16
using Element = cutlass::bfloat16_t;
#else
using Element = cutlass::half_t;
#endif

// Rows of q and keys of a tile: those of FlashInfer's kernel for contiguous keys (`getCTATileSize`).
constexpr int kTileRows = INGOT_DIM == 64 ? 192 : 128;
constexpr int kTileKeys = INGOT_DIM == 256 ? 64 : 128;

struct VariantParams {
  float sm_scale;
  float logits_soft_cap;
};

using Variant = flashinfer::DefaultAttention<kHasSoftCap>;

struct Traits : flashinfer::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/true, INGOT_DIM, INGOT_DIM, kTileRows, kTileKeys,
                                                  /*NUM_STAGES=*/2, Element, Element, Element, int32_t, Variant> {
  using Base = flashinfer::AttentionKernelTraits<true, INGOT_DIM, INGOT_DIM, kTileRows, kTileKeys, 2, Element, Element,
                                                 Element, int32_t, Variant>;
  // Adds the number of the item that a block takes next.
  struct SharedStorage : Base::SharedStorage {
    int next;
  };
};

// An item is a tile of one head. A block takes the next free item: its first producer thread takes the number when it
// begins the item before, and passes it to the other threads. The cache heads come in passes; within a pass, q heads
// that read the same keys are adjacent.
struct TileScheduler {
  struct Params {
    Call call;
    int32_t* taken;
    const int32_t *count, *kv_heads, *sequences, *indices;
  };

  struct WorkTileInfo {
    int next, tile, head, start, pages, length_of_q, length, sequence;
    bool valid;

    CUTLASS_DEVICE bool is_valid(const Params&) const { return valid; }

    CUTLASS_DEVICE auto get_block_coord(const Params&) const {
      return cute::tuple{tile, head, head / kGroup, start, pages, length_of_q, length, sequence};
    }
  };

  // Three barriers that FlashInfer's kernel does not use (`NamedBarriers`, of 8): `next` was written, all producer
  // threads have read it, and the consumer threads have read it.
  static constexpr int kWritten = 5, kLoading = 6, kRead = 7;
  static constexpr int kLoaders = Traits::NUM_PRODUCER_THREADS;
  static constexpr int kThreads = Traits::NUM_MMA_THREADS + kLoaders;

  CUTLASS_DEVICE TileScheduler() {}

  CUTLASS_DEVICE static int& shared_next() {
    extern __shared__ char shared_memory[];
    return reinterpret_cast<Traits::SharedStorage*>(shared_memory)->next;
  }

  CUTLASS_DEVICE static WorkTileInfo work_of(const Params& params, int item) {
    const Call& call = params.call;
    const int count = *params.count;
    if (item >= count * INGOT_HEADS) return WorkTileInfo{0, 0, 0, 0, 0, 0, 0, 0, false};
    const int heads = *params.kv_heads * kGroup, pass = item / (count * heads), left = item % (count * heads);
    const int sequence = params.sequences[left / heads];
    return WorkTileInfo{threadIdx.x ? 0 : atomicAdd(params.taken, 1) + int(gridDim.x),
                        params.indices[left / heads],
                        pass * heads + left % heads,
                        call.q_starts[sequence],
                        sequence * call.width,
                        call.q_lens[sequence],
                        call.kv_lens[sequence],
                        sequence,
                        true};
  }

  CUTLASS_DEVICE WorkTileInfo get_initial_work(const Params& params) const { return work_of(params, int(blockIdx.x)); }

  CUTLASS_DEVICE void init_consumer() const { cutlass::arch::NamedBarrier::arrive(kThreads, kRead); }

  CUTLASS_DEVICE void prefetch_next_work(const Params&, WorkTileInfo&) const {}

  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo& work) const {
    cutlass::arch::NamedBarrier::sync(kThreads, kRead);
    if (threadIdx.x == 0) shared_next() = work.next;
    cutlass::arch::NamedBarrier::sync(kLoaders, kLoading);
    work.next = shared_next();
    cutlass::arch::NamedBarrier::arrive(kThreads, kWritten);
  }

  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(const Params& params, const WorkTileInfo& work) const {
    if constexpr (is_producer) return work_of(params, work.next);
    cutlass::arch::NamedBarrier::sync(kThreads, kWritten);
    const int next = shared_next();
    cutlass::arch::NamedBarrier::arrive(kThreads, kRead);
    return work_of(params, next);
  }
};

using Mainloop = PagedMainloop<VariantParams, Traits>;
using Epilogue = flashinfer::CollectiveEpilogue<Traits>;

Cut cut_many() { return {kTileRows, 1}; }

const auto kKernel =
    flashinfer::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, /*LEFT_SLIDING_WINDOW=*/kHasWindow,
                                         /*CAUSAL=*/true, TileScheduler>;
constexpr int kShared = sizeof(typename Traits::SharedStorage);

// The number of blocks of a launch: one block takes a multiprocessor's shared memory.
int multiprocessors;

cudaError_t prepare_many() {
  int device;
  if (cudaError_t status = cudaGetDevice(&device)) return status;
  if (cudaError_t status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device))
    return status;
  return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
}

cudaError_t launch_many(const Call& call, const Part& part) {
  const auto mainloop =
      Mainloop::to_params(call, kWindowLeft, VariantParams{float(INGOT_SCALE), float(INGOT_SOFT_CAP)});
  const auto epilogue = Epilogue::to_underlying_arguments(
      {static_cast<Element*>(call.out),
       flashinfer::get_gmem_layout(call.tokens, INGOT_HEADS, INGOT_DIM, int64_t(INGOT_HEADS) * INGOT_DIM,
                                   int64_t(INGOT_DIM)),
       /*lse_ptr=*/nullptr, flashinfer::get_lse_gmem_layout(call.tokens, INGOT_HEADS)});
  const TileScheduler::Params scheduler{call, part.taken, part.count, part.kv_heads, part.sequences, part.indices};
  const int blocks = min(part.most * INGOT_HEADS, multiprocessors);
  kKernel<<<blocks, Traits::NUM_WARPS * 32, kShared, call.stream>>>(mainloop, epilogue, scheduler);
  return cudaGetLastError();
}

}  // namespace ingot
