// Attention of sequences of many tokens by FlashAttention-2.
#include "fa2.cuh"

namespace ingot {

// Of the sizes that FlashInfer has (`FA2DetermineCtaTileQ`) the one for many rows.
constexpr int kTileRows = INGOT_DIM < 256 ? 128 : 64;

int tiles_of(int tokens, int sequences, int least) { return most_tiles(tokens, sequences, least, kTileRows, kGroup); }

int64_t work_words_many(int tokens, int sequences) {
  return fa2::work_words(tiles_of(tokens, sequences, 1), sequences);
}

cudaError_t prepare_many() { return cudaSuccess; }  // FlashInfer does what there is, in each call

cudaError_t launch_many(const Call& call, Range range) {
  const int tiles = tiles_of(call.tokens, call.sequences, range.least);
  return fa2::launch<kTileRows>(call, range, tiles, call.work, call.stream);
}

}  // namespace ingot
