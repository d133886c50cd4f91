// Attention of sequences of many tokens by FlashAttention-2.
#include "fa2.cuh"

namespace ingot {

// Of the sizes that FlashInfer has (`FA2DetermineCtaTileQ`) the one for many rows.
constexpr int kTileRows = INGOT_DIM < 256 ? 128 : 64;

cudaError_t prepare_many() { return cudaSuccess; }  // FlashInfer does what there is, in each call

Cut cut_many() { return {kTileRows, kGroup}; }

cudaError_t launch_many(const Call& call, const Part& part) { return fa2::launch<kTileRows>(call, part, call.stream); }

}  // namespace ingot
