// Attention of sequences of many tokens by FlashAttention-3, for GPUs of compute capability 9.0 alone.
//
// FlashInfer plans a step on the host and gives each multiprocessor a list. Here a block is a tile of one head, and
// finds out by itself which, from the lengths that the step has on the device.
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>

#include "attention.cuh"

namespace ingot {

#ifdef INGOT_BF16
using Element = cutlass::bfloat16_t;
#else
using Element = cutlass::half_t;
#endif

// Rows of q and keys of a tile: those of FlashInfer's `BatchPrefillWithPagedKVCacheDispatched`.
constexpr int kTileRows = INGOT_DIM == 64 ? 192 : 128;
constexpr int kTileKeys = INGOT_DIM == 256 ? 32 : 96;

struct VariantParams {
  float sm_scale;
  float logits_soft_cap;
};

// One tile for each block, all heads of a tile side by side: long work begins first, and where there are fewer tiles
// than blocks, what has nothing to do comes last.
struct TileScheduler {
  struct Params {
    Call call;
    Range range;
  };

  struct WorkTileInfo {
    int tile, head, start, pages, count, length, sequence;
    bool valid;

    CUTLASS_DEVICE bool is_valid(const Params&) const { return valid; }

    CUTLASS_DEVICE auto get_block_coord(const Params&) const {
      return cute::tuple{tile, head, head / kGroup, start, pages, count, length, sequence};
    }
  };

  CUTLASS_DEVICE TileScheduler() {}

  CUTLASS_DEVICE WorkTileInfo get_initial_work(const Params& params) const {
    const Call& call = params.call;
    const Tile found = tile_of(call, params.range, int(blockIdx.x) / INGOT_HEADS, kTileRows, 1);
    if (found.sequence < 0) return WorkTileInfo{0, 0, 0, 0, 0, 0, 0, false};
    const int head = int(blockIdx.x) % INGOT_HEADS;
    return WorkTileInfo{found.index,
                        head,
                        __ldg(call.q_starts + found.sequence),
                        found.sequence * call.width,
                        __ldg(call.q_lens + found.sequence),
                        __ldg(call.kv_lens + found.sequence),
                        found.sequence,
                        true};
  }

  CUTLASS_DEVICE void init_consumer() const {}
  CUTLASS_DEVICE void prefetch_next_work(const Params&, WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo&) const {}

  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(const Params&, const WorkTileInfo&) const {
    return WorkTileInfo{0, 0, 0, 0, 0, 0, 0, false};
  }
};

using Variant = flashinfer::DefaultAttention<kHasSoftCap>;
using Traits =
    flashinfer::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/false, INGOT_DIM, INGOT_DIM, kTileRows, kTileKeys,
                                      /*NUM_STAGES=*/2, Element, Element, Element, int32_t, Variant>;
using Mainloop = flashinfer::SparseCollectiveMainloop<VariantParams, Traits, /*CAUSAL=*/true>;
using Epilogue = flashinfer::CollectiveEpilogue<Traits>;

int64_t work_words_many(int, int) { return 0; }

const auto kKernel =
    flashinfer::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, /*LEFT_SLIDING_WINDOW=*/kHasWindow,
                                         /*CAUSAL=*/true, TileScheduler>;
constexpr int kShared = sizeof(typename Traits::SharedStorage);

cudaError_t prepare_many() {
  return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
}

cudaError_t launch_many(const Call& call, Range range) {
  Element* kv = static_cast<Element*>(call.kv);
  // Of the cache's layouts only the strides are read.
  const auto cache = flashinfer::get_gmem_layout(0, INGOT_KV_HEADS, INGOT_DIM, kSlotStride, int64_t(INGOT_DIM));
  const auto mainloop = Mainloop::to_underlying_arguments(
      {static_cast<Element*>(call.q),
       flashinfer::get_gmem_layout(call.tokens, INGOT_HEADS, INGOT_DIM, int64_t(INGOT_Q_TOKEN), int64_t(INGOT_Q_HEAD)),
       kv, cache, kv + kPartStride, cache, call.page_table, kWindowLeft, kPageStride, kPageStride, INGOT_PAGE,
       VariantParams{float(INGOT_SCALE), float(INGOT_SOFT_CAP)}});
  const auto epilogue = Epilogue::to_underlying_arguments(
      {static_cast<Element*>(call.out),
       flashinfer::get_gmem_layout(call.tokens, INGOT_HEADS, INGOT_DIM, int64_t(INGOT_HEADS) * INGOT_DIM,
                                   int64_t(INGOT_DIM)),
       /*lse_ptr=*/nullptr, flashinfer::get_lse_gmem_layout(call.tokens, INGOT_HEADS)});
  const TileScheduler::Params scheduler{call, range};
  const int tiles = most_tiles(call.tokens, call.sequences, range.least, kTileRows, 1);
  kKernel<<<tiles * INGOT_HEADS, Traits::NUM_WARPS * 32, kShared, call.stream>>>(mainloop, epilogue, scheduler);
  return cudaGetLastError();
}

}  // namespace ingot
