// Attention over pages by FlashInfer's FlashAttention-2 kernel, for any GPU from compute capability 8.0 on.
//
// FlashInfer plans a step on the host. Here a small kernel does that on the device, from the lengths that the step has
// there. The rows of a tile are tokens times heads of a group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>
#include <flashinfer/pos_enc.cuh>

#include "attention.cuh"

namespace ingot::fa2 {

#ifdef INGOT_BF16
using Element = nv_bfloat16;
#else
using Element = half;
#endif

// What the kernel reads, by the names that it reads it by. A request is a sequence.
struct Params {
  using DTypeQ = Element;
  using DTypeKV = Element;
  using DTypeO = Element;
  using IdType = int32_t;

  DTypeQ* q;
  flashinfer::paged_kv_t<DTypeKV, IdType> paged_kv;
  IdType* q_indptr;
  DTypeO* o;
  float* lse;
  flashinfer::uint_fastdiv group_size;
  uint32_t num_qo_heads;
  IdType q_stride_n;
  IdType q_stride_h;
  int32_t window_left;
  float sm_scale;
  float logits_soft_cap;

  IdType* request_indices;
  IdType* qo_tile_indices;
  IdType* kv_tile_indices;
  IdType* merge_indptr;
  IdType* o_indptr;
  bool* block_valid_mask;
  IdType* kv_chunk_size_ptr;
  uint32_t max_total_num_rows;
  uint32_t* total_num_rows;
  uint32_t padded_batch_size;
  bool partition_kv;

  IdType* q_lens;
  IdType* kv_lens;

  __host__ __device__ __forceinline__ uint32_t get_qo_len(uint32_t b) const { return q_lens[b]; }
  __host__ __device__ __forceinline__ uint32_t get_kv_len(uint32_t b) const { return kv_lens[b]; }
};

// The scratch of a launch, in numbers: the sequence and the index of each tile, a zero for each, where each sequence's
// pages begin in the table, and a byte for each tile that says whether there is one.
struct Work {
  int32_t *sequences, *indices, *zeros, *pages;
  bool* valid;

  Work(int32_t* at, int tiles, int count)
      : sequences(at),
        indices(at + tiles),
        zeros(at + 2 * tiles),
        pages(at + 3 * tiles),
        valid(reinterpret_cast<bool*>(at + 3 * tiles + count + 1)) {}
};

inline int64_t work_words(int tiles, int sequences) {
  return 3 * int64_t(tiles) + sequences + 1 + cdiv(tiles, sizeof(int32_t));
}

static __global__ void plan(Call call, Range range, Work work, int tiles, int rows) {
  const int item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item <= call.sequences) work.pages[item] = item * call.width;
  if (item >= tiles) return;
  const Tile tile = tile_of(call, range, item, rows, kGroup);
  work.valid[item] = tile.sequence >= 0;
  work.sequences[item] = max(tile.sequence, 0);
  work.indices[item] = tile.index;
  work.zeros[item] = 0;
}

// Attention of the sequences in a range, which fall into `tiles` tiles of `kRows` rows at most.
template <int kRows>
cudaError_t launch(const Call& call, Range range, int tiles, int32_t* scratch, cudaStream_t stream) {
  const Work work(scratch, tiles, call.sequences);
  const int items = tiles > call.sequences + 1 ? tiles : call.sequences + 1;
  plan<<<cdiv(items, 128), 128, 0, stream>>>(call, range, work, tiles, kRows);
  if (cudaError_t status = cudaGetLastError()) return status;

  Element* kv = static_cast<Element*>(call.kv);
  const int64_t strides[4] = {kPageStride, kSlotStride, INGOT_DIM, 1};
  Params params{};
  params.q = static_cast<Element*>(call.q);
  params.paged_kv = flashinfer::paged_kv_t<Element, int32_t>(
      INGOT_KV_HEADS, INGOT_PAGE, INGOT_DIM, call.sequences, flashinfer::QKVLayout::kNHD, kv, kv + kPartStride,
      strides, call.page_table, work.pages, /*last_page_len=*/nullptr);
  params.q_indptr = params.o_indptr = call.q_starts;
  params.o = static_cast<Element*>(call.out);
  params.group_size = flashinfer::uint_fastdiv(kGroup);
  params.num_qo_heads = INGOT_HEADS;
  params.q_stride_n = INGOT_Q_TOKEN;
  params.q_stride_h = INGOT_Q_HEAD;
  params.window_left = kWindowLeft;
  params.sm_scale = INGOT_SCALE;
  params.logits_soft_cap = INGOT_SOFT_CAP;
  params.request_indices = work.sequences;
  params.qo_tile_indices = work.indices;
  params.kv_tile_indices = work.zeros;
  params.kv_chunk_size_ptr = work.zeros;  // read, and not used: contexts are not cut
  params.block_valid_mask = work.valid;
  params.padded_batch_size = tiles;
  params.q_lens = call.q_lens;
  params.kv_lens = call.kv_lens;
  using Variant = flashinfer::DefaultAttention</*use_custom_mask=*/false, kHasWindow, kHasSoftCap, /*use_alibi=*/false>;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
      kRows, INGOT_DIM, INGOT_DIM, flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false,
      flashinfer::MaskMode::kCausal, Variant, Params>(params, /*tmp_v=*/nullptr, /*tmp_s=*/nullptr,
                                                      /*enable_pdl=*/false, stream);
}

}  // namespace ingot::fa2
