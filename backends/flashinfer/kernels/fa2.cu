// Attention of sequences of many tokens with FlashAttention-2.
#include "fa2.cuh"

namespace ingot {

// The tile size of FlashInfer for many rows (`FA2DetermineCtaTileQ`).
constexpr int kTileRows = INGOT_DIM < 256 ? 128 : 64;

cudaError_t prepare_many() { return cudaSuccess; }  // FlashInfer does its setup in each call

Cut cut_many() { return {kTileRows, kGroup}; }

cudaError_t launch_many(const Call& call, const Part& part) { return fa2::launch<kTileRows>(call, part, call.stream); }

}  // namespace ingot
