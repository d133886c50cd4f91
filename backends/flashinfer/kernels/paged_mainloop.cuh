// The main loop of FlashAttention-3 with keys and values loaded by the tensor memory accelerator (TMA), page by page.
//
// FlashInfer uses TMA for contiguous keys, one instruction per tile. For a paged cache its 128 threads copy 16 bytes
// each, with registers that the matmuls then lack. Here one load takes all pages of a tile if they are adjacent, as a
// prompt's pages are if the pool allows. Otherwise the lanes of a warp issue one load per page. On an H200, a prompt of
// 8192 tokens with heads of 128 takes 0.83 ms with one load per tile, 1.05 ms with one per page, and 1.19 ms with
// copies.
#pragma once

#include <cuda.h>

#include <flashinfer/attention/hopper/mainloop.cuh>
#include <numeric>

#include "attention.cuh"

namespace ingot {

// The elements of a head per load: tiles in shared memory have rows of 128 bytes, for wgmma.
constexpr int kSpan = 64;
constexpr int kSpans = INGOT_DIM / kSpan;

// Makes a tensor map of the cache, (element, position, head, keys or values, page), for loads of `rows` positions of
// each of `pages` pages.
inline CUresult map_cache(CUtensorMap& map, const Call& call, uint32_t rows, uint32_t pages) {
  constexpr uint64_t kBytes = 2;  // of an element
  const uint64_t sizes[] = {INGOT_DIM, INGOT_PAGE, INGOT_KV_HEADS, 2, uint64_t(call.pages)};
  const uint64_t strides[] = {kSlotStride * kBytes, INGOT_DIM * kBytes, kPartStride * kBytes, kPageStride * kBytes};
  const uint32_t box[] = {kSpan, rows, 1, 1, pages}, steps[] = {1, 1, 1, 1, 1};
#ifdef INGOT_BF16
  const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#else
  const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#endif
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &map, type, 5, call.kv, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <typename AdditionalParams, typename Traits>
struct PagedMainloop : flashinfer::CollectiveMainloop<AdditionalParams, Traits, /*CAUSAL=*/true> {
  using Base = flashinfer::CollectiveMainloop<AdditionalParams, Traits, true>;
  using Element = typename Traits::DTypeKV;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;

  static constexpr int kTileRows = Traits::CTA_Q;
  static constexpr int kTileKeys = Traits::CTA_KV;
  static constexpr int kRows = std::gcd(INGOT_PAGE, kTileKeys);  // rows of a load from one page
  static constexpr int kPlaces = kTileKeys / kRows;
  static constexpr int kWholePages = kRows == INGOT_PAGE ? kPlaces : 1;  // pages that one load may take
  static constexpr int kLanes = 32;
  static_assert(kPlaces * kSpans <= kLanes, "a lane issues one load of a tile");
  static_assert(kRows % 8 == 0, "a load begins where the pattern of shared memory does");

  // Returns the offset in shared memory of a tile's `row` of a span, in elements, before the swizzle within 8 rows.
  CUTE_HOST_DEVICE static constexpr int place_of(int row, int span, int stage) {
    return ((stage * kSpans + span) * kTileKeys + row) * kSpan;
  }
  static_assert(typename Base::SmemLayoutK{}.layout_b()(9, INGOT_DIM - kSpan, 1) == place_of(9, kSpans - 1, 1));
  static_assert(typename Base::SmemLayoutV{}.layout_b()(9, INGOT_DIM - kSpan, 1) == place_of(9, kSpans - 1, 1));

  struct Params {
    typename Base::LayoutT layout_Q;
    typename Base::TMA_Q tma_load_Q;
    CUtensorMap tile;  // for loads of kWholePages pages
    CUtensorMap page;  // for loads of kRows positions of one page
    CUtensorMap row;   // for loads of one position
    const int32_t* page_table;
    int no_page;  // the page after the last one: TMA loads zeros from it
    int window_left;
    AdditionalParams additional_params;
  };

  // Makes the parameters. Throws std::runtime_error if the cache cannot be mapped.
  static Params to_params(const Call& call, int window_left, AdditionalParams additional) {
    const auto layout = flashinfer::get_gmem_layout(call.tokens, INGOT_HEADS, INGOT_DIM, int64_t(INGOT_Q_TOKEN),
                                                    int64_t(INGOT_Q_HEAD));
    const auto q = cute::make_tensor(cute::make_gmem_ptr(static_cast<const Element*>(call.q)), layout);
    Params params{layout,
                  cute::make_tma_copy(typename Base::GmemTiledCopyQ{}, q, typename Base::SmemLayoutQ{},
                                      cute::select<0, 2>(typename Base::TileShape_QKD{}), cute::_1{}),
                  {},
                  {},
                  {},
                  call.page_table,
                  call.pages,
                  window_left,
                  additional};
    if (map_cache(params.tile, call, kRows, kWholePages) || map_cache(params.page, call, kRows, 1) ||
        map_cache(params.row, call, 1, 1))
      throw std::runtime_error("the cache cannot be mapped for the tensor memory accelerator");
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(params.tma_load_Q.get_tma_descriptor());
    cute::prefetch_tma_descriptor(&params.tile);
    cute::prefetch_tma_descriptor(&params.page);
    cute::prefetch_tma_descriptor(&params.row);
  }

  // Returns the number of tiles of keys up to the last one that a tile of queries sees.
  CUTLASS_DEVICE int get_num_kv_tiles(const Params&, int tile, int length_of_q, int length) const {
    const int seen = length - length_of_q + (tile + 1) * kTileRows;
    return cdiv(seen < length ? seen : length, kTileKeys);
  }

  // The keys or values of one head of a sequence.
  struct Source {
    const Params& params;
    const int32_t* pages;
    int length, head, part;

    CUTLASS_DEVICE int page_of(int position) const {
      return position < length ? __ldg(pages + position / INGOT_PAGE) : params.no_page;
    }

    CUTLASS_DEVICE void load(const CUtensorMap& map, uint64_t* barrier, Element* into, int span, int position,
                             int page) const {
      cute::SM90_TMA_LOAD_5D::copy(&map, barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), into, span * kSpan,
                                   position % INGOT_PAGE, head, part, page);
    }
  };

  // Loads one tile, with all lanes of the producer warp. In the last tile, keys after the sequence's end are masked, so
  // they may be anything. Values after the end must be zeros: a page may hold NaN there, and zero times NaN is NaN.
  template <bool kValues>
  CUTLASS_DEVICE static void load_tile(const Source& source, MainloopPipeline& pipeline, PipelineState& state,
                                       Element* shared, int tile) {
    constexpr unsigned kAll = 0xffffffff;
    const int lane = threadIdx.x % kLanes, span = lane % kSpans, place = lane / kSpans, row = place * kRows;
    const int first = tile * kTileKeys, cut = source.length - first;  // rows of the tile before the sequence's end
    const bool issues = place < kPlaces, ends = cut < kTileKeys;
    const int page = issues ? source.page_of(first + row) : 0;
    const bool behind = page == __shfl_sync(kAll, page, 0) + place || !issues || row >= cut;
    const bool together = kWholePages > 1 && __all_sync(kAll, behind) && !(kValues && ends);
    if (lane == 0) pipeline.producer_acquire(state);
    __syncwarp();
    auto* barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(state));
    const int stage = state.index();
    const bool partly = kValues && ends && cut % kRows;
    if (together) {
      if (place == 0) source.load(source.params.tile, barrier, shared + place_of(0, span, stage), span, first, page);
    } else if (issues && !(partly && row == cut / kRows * kRows)) {
      source.load(source.params.page, barrier, shared + place_of(row, span, stage), span, first + row, page);
    }
    if (partly)
      for (int one = lane; one < kRows * kSpans; one += kLanes) {
        const int at = cut / kRows * kRows + one / kSpans, of = one % kSpans;
        source.load(source.params.row, barrier, shared + place_of(at, of, stage), of, first + at,
                    source.page_of(first + at));
      }
    __syncwarp();
    ++state;
  }

  // Loads the tiles of a work item, the last one first. Values follow keys by one tile.
  template <bool kWindow, typename Coord, typename Scheduler, typename Shared>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline_k, MainloopPipeline pipeline_v,
                           PipelineState& state_k, PipelineState& state_v, Shared& shared, Scheduler& scheduler,
                           const typename Scheduler::Params&, typename Scheduler::WorkTileInfo& item,
                           const Coord& coord, int work) {
    using flashinfer::NamedBarriers;
    const auto [tile_of_q, head, kv_head, start, pages, length_of_q, length, sequence] = coord;
    const Source keys{params, params.page_table + pages, length, kv_head, 0};
    const Source values{params, params.page_table + pages, length, kv_head, 1};
    int first = 0;
    if constexpr (kWindow)
      first = flashinfer::get_swa_begin_kv_tile_idx<kTileRows, kTileKeys>(params.window_left, tile_of_q, length_of_q,
                                                                         length);
    int tile = get_num_kv_tiles(params, tile_of_q, length_of_q, length) - 1;
    load_tile<false>(keys, pipeline_k, state_k, shared.smem_k.data(), tile);

    // Wait until the matmuls of the previous item have read its queries.
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS + Traits::NUM_PRODUCER_THREADS,
                                      static_cast<int>(NamedBarriers::kQueryEmpty));
    if (threadIdx.x % kLanes == 0) load_queries(params, shared, tile_of_q, head, start, length_of_q);
    __syncwarp();
    // Values share memory with the results of the previous item: wait until these are stored.
    shared.barrier_O.wait((work + 1) % 2);

    for (; tile > first; tile--) {
      load_tile<false>(keys, pipeline_k, state_k, shared.smem_k.data(), tile - 1);
      load_tile<true>(values, pipeline_v, state_v, shared.smem_v.data(), tile);
    }
    load_tile<true>(values, pipeline_v, state_v, shared.smem_v.data(), tile);
    scheduler.broadcast_next_work(item);
  }

  template <typename Shared>
  CUTLASS_DEVICE static void load_queries(const Params& params, Shared& shared, int tile, int head, int start,
                                          int length) {
    using namespace cute;
    const auto shape = select<0, 2>(typename Base::TileShape_QKD{});
    const Tensor whole = params.tma_load_Q.get_tma_tensor(params.layout_Q.shape());
    const Tensor from = flashinfer::get_local_tile_tensor(whole, shape, head, start, length)(_, _, tile);
    const Tensor into = make_tensor(make_smem_ptr(shared.smem_q.data()), typename Base::SmemLayoutQ{});
    auto [source, target] = tma_partition(params.tma_load_Q, _0{}, Layout<_1>{}, group_modes<0, 2>(into),
                                                group_modes<0, 2>(from));
    shared.barrier_Q.arrive_and_expect_tx(Base::TmaTransactionBytesQ);
    copy(params.tma_load_Q.with(
             reinterpret_cast<cutlass::arch::ClusterTransactionBarrier::ValueType&>(shared.barrier_Q), /*mcast=*/0),
         source, target);
  }
};

}  // namespace ingot
