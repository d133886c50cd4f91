// Stands for what nvcc builds of kernels/attention.cuh: the same functions, on a CPU, one query after the other.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct Call {
  uint16_t *out, *kv, *q;
  int32_t *page_table, *q_starts, *q_lens, *kv_lens, *work;
  int64_t stream;
  int32_t tokens, sequences, width;
};

static float wide(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

static uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static bool prepared;

extern "C" const char* ingot_prepare() {
  prepared = true;
  return nullptr;
}

extern "C" int64_t ingot_work_words(int32_t tokens, int32_t sequences) { return tokens + sequences; }

extern "C" const char* ingot_attention(const Call* call) {
  if (!prepared) return "ingot_prepare was not called";
  if (call->stream != 77) return "it is not launched on the current stream";
  for (int i = 0; i < call->tokens + call->sequences; i++) call->work[i] = i;
  const int64_t slot = INGOT_KV_HEADS * INGOT_DIM, part = INGOT_PAGE * slot;
  std::memset(call->out, 0, 2ll * call->tokens * INGOT_HEADS * INGOT_DIM);
  for (int b = 0; b < call->sequences; b++)
    for (int i = 0; i < call->q_lens[b]; i++)
      for (int h = 0; h < INGOT_HEADS; h++) {
        const int64_t row = call->q_starts[b] + i, seen = call->kv_lens[b] - call->q_lens[b] + i + 1;
        const uint16_t* q = call->q + row * INGOT_Q_TOKEN + h * INGOT_Q_HEAD;
        std::vector<float> sum(INGOT_DIM, 0.f);
        float total = 0;
        for (int64_t p = INGOT_WINDOW >= 0 && seen > INGOT_WINDOW ? seen - INGOT_WINDOW : 0; p < seen; p++) {
          const int64_t page = call->page_table[int64_t(b) * call->width + p / INGOT_PAGE];
          const uint16_t* k = call->kv + page * 2 * part + p % INGOT_PAGE * slot +
                              h / (INGOT_HEADS / INGOT_KV_HEADS) * INGOT_DIM;
          float score = 0;
          for (int d = 0; d < INGOT_DIM; d++) score += wide(q[d]) * wide(k[d]);
          const float weight = std::exp(score * float(INGOT_SCALE));
          total += weight;
          for (int d = 0; d < INGOT_DIM; d++) sum[d] += weight * wide(k[part + d]);
        }
        for (int d = 0; d < INGOT_DIM; d++)
          call->out[(row * INGOT_HEADS + h) * INGOT_DIM + d] = narrow(sum[d] / total);
      }
  return nullptr;
}
