// Attention of sequences of many tokens by FlashAttention-3, for GPUs of compute capability 9.0 alone.
//
// FlashInfer plans a step on the host and gives each multiprocessor a list. Here the step's tiles are listed on the
// device, and each multiprocessor takes every so-manyth of them.
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

// An item is a tile of one head, all heads of a tile side by side. Within a sequence later tiles see more and come first,
// so that the items of a block, which lie as far apart as there are blocks, are about as much work as another's.
struct TileScheduler {
  struct Params {
    Call call;
    const int32_t *count, *sequences, *indices;
  };

  struct WorkTileInfo {
    int item, tile, head, start, pages, length_of_q, length, sequence;
    bool valid;

    CUTLASS_DEVICE bool is_valid(const Params&) const { return valid; }

    CUTLASS_DEVICE auto get_block_coord(const Params&) const {
      return cute::tuple{tile, head, head / kGroup, start, pages, length_of_q, length, sequence};
    }
  };

  CUTLASS_DEVICE TileScheduler() {}

  CUTLASS_DEVICE static WorkTileInfo work_of(const Params& params, int item) {
    const Call& call = params.call;
    const int place = item / INGOT_HEADS;
    if (place >= *params.count) return WorkTileInfo{item, 0, 0, 0, 0, 0, 0, 0, false};
    const int sequence = params.sequences[place];
    return WorkTileInfo{item,
                        params.indices[place],
                        item % INGOT_HEADS,
                        call.q_starts[sequence],
                        sequence * call.width,
                        call.q_lens[sequence],
                        call.kv_lens[sequence],
                        sequence,
                        true};
  }

  CUTLASS_DEVICE WorkTileInfo get_initial_work(const Params& params) const { return work_of(params, int(blockIdx.x)); }

  CUTLASS_DEVICE void init_consumer() const {}
  CUTLASS_DEVICE void prefetch_next_work(const Params&, WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo&) const {}

  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(const Params& params, const WorkTileInfo& work) const {
    return work_of(params, work.item + int(gridDim.x));
  }
};

using Variant = flashinfer::DefaultAttention<kHasSoftCap>;
using Traits =
    flashinfer::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/true, INGOT_DIM, INGOT_DIM, kTileRows, kTileKeys,
                                      /*NUM_STAGES=*/2, Element, Element, Element, int32_t, Variant>;
using Mainloop = PagedMainloop<VariantParams, Traits>;
using Epilogue = flashinfer::CollectiveEpilogue<Traits>;

Cut cut_many() { return {kTileRows, 1}; }

const auto kKernel =
    flashinfer::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, /*LEFT_SLIDING_WINDOW=*/kHasWindow,
                                         /*CAUSAL=*/true, TileScheduler>;
constexpr int kShared = sizeof(typename Traits::SharedStorage);

// A block takes a multiprocessor's shared memory.
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
  const TileScheduler::Params scheduler{call, part.count, part.sequences, part.indices};
  const int blocks = min(part.most * INGOT_HEADS, multiprocessors);
  kKernel<<<blocks, Traits::NUM_WARPS * 32, kShared, call.stream>>>(mainloop, epilogue, scheduler);
  return cudaGetLastError();
}

}  // namespace ingot
