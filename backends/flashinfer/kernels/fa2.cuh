// Attention over pages with FlashInfer's FlashAttention-2 kernel, for any GPU from compute capability 8.0 on.
//
// FlashInfer plans a step on the host. Here the device lists the step's tiles. The rows of a tile are tokens times
// heads of a group.
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

// The parameters of the kernel, with the names that it requires. A request is a sequence.
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

// Launches attention of the sequences of a part, in tiles of `kRows` rows.
template <int kRows>
cudaError_t launch(const Call& call, const Part& part, cudaStream_t stream) {
  Element* kv = static_cast<Element*>(call.kv);
  const int64_t strides[4] = {kPageStride, kSlotStride, INGOT_DIM, 1};
  Params params{};
  params.q = static_cast<Element*>(call.q);
  params.paged_kv = flashinfer::paged_kv_t<Element, int32_t>(
      INGOT_KV_HEADS, INGOT_PAGE, INGOT_DIM, call.sequences, flashinfer::QKVLayout::kNHD, kv, kv + kPartStride,
      strides, call.page_table, part.pages, /*last_page_len=*/nullptr);
  params.q_indptr = params.o_indptr = call.q_starts;
  params.o = static_cast<Element*>(call.out);
  params.group_size = flashinfer::uint_fastdiv(kGroup);
  params.num_qo_heads = INGOT_HEADS;
  params.q_stride_n = INGOT_Q_TOKEN;
  params.q_stride_h = INGOT_Q_HEAD;
  params.window_left = kWindowLeft;
  params.sm_scale = INGOT_SCALE;
  params.logits_soft_cap = INGOT_SOFT_CAP;
  params.request_indices = part.sequences;
  params.qo_tile_indices = part.indices;
  params.kv_tile_indices = part.zeros;
  params.kv_chunk_size_ptr = part.zeros;  // read but not used: contexts are not split
  params.block_valid_mask = part.valid;
  params.padded_batch_size = part.most;
  params.q_lens = call.q_lens;
  params.kv_lens = call.kv_lens;
  using Variant = flashinfer::DefaultAttention</*use_custom_mask=*/false, kHasWindow, kHasSoftCap, /*use_alibi=*/false>;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
      kRows, INGOT_DIM, INGOT_DIM, flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false,
      flashinfer::MaskMode::kCausal, Variant, Params>(params, /*tmp_v=*/nullptr, /*tmp_s=*/nullptr,
                                                      /*enable_pdl=*/false, stream);
}

}  // namespace ingot::fa2
