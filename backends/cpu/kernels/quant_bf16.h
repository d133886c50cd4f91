// Products of bfloat16 with quantized weights by AVX512-BF16: codes become bfloat16 by lookups in registers.

#pragma once

#include "quant.h"

// A lookup of 128 bytes needs VBMI, and the sign trick of `Bytes` needs GFNI. Processors since Ice Lake and Zen 4 with
// AVX512-BF16 have both.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__GFNI__)
#define QUANT_BF16

namespace {

// Eight-bit codes, in chunks of 64 columns. Each becomes v + 1/2, where v is its signed number: 1/2 makes the numbers
// symmetric, so that seven bits and a sign select one. `SHIFT` undoes it, and the offset of unsigned codes.
template <bool UNSIGNED>
struct Bytes {
  static constexpr int64_t CHUNK = 64, PARTS = 2;
  static constexpr bool SHIFTED = true;
  static constexpr float SHIFT = UNSIGNED ? 0.5f - 128 : 0.5f;
  __m512i low[2], high[2];

  explicit Bytes(const Quantized &) {
    static const Table table;
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_loadu_si512(table.bytes[0] + 64 * half);
      high[half] = _mm512_loadu_si512(table.bytes[1] + 64 * half);
    }
  }

  // The low and the high bytes of 1/2, 3/2 and so on in bfloat16.
  struct Table {
    uint8_t bytes[2][128];

    Table() {
      for (int i = 0; i < 128; ++i) {
        BFloat16 number;
        store(static_cast<float>(i) + 0.5f, &number);
        bytes[0][i] = static_cast<uint8_t>(number.bits);
        bytes[1][i] = static_cast<uint8_t>(number.bits >> 8);
      }
    }
  };

  void decode(__m512i codes, __m512bh (&parts)[PARTS]) const {
    // A product with a matrix of bits inverts the seven bits of negative numbers, and keeps the sign.
    constexpr int64_t INVERT = static_cast<int64_t>(0x8182848890A0C080);
    const __m512i magnitude = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(INVERT), UNSIGNED ? 0xFF : 0);
    const __m512i lows = _mm512_permutex2var_epi8(low[0], magnitude, low[1]);
    __m512i highs = _mm512_permutex2var_epi8(high[0], magnitude, high[1]);
    highs = _mm512_ternarylogic_epi32(highs, magnitude, _mm512_set1_epi8(-128), 0xF8);  // highs | sign
    parts[0] = (__m512bh)_mm512_unpacklo_epi8(lows, highs);
    parts[1] = (__m512bh)_mm512_unpackhi_epi8(lows, highs);
  }

  // Writes 64 elements in the order of `decode`: in each run of sixteen, the first eight belong to part 0.
  static void arrange(const BFloat16 *x, BFloat16 *out) {
    for (int run = 0; run < 4; ++run)
      for (int part = 0; part < 2; ++part) std::memcpy(out + 32 * part + 8 * run, x + 16 * run + 8 * part, 16);
  }
};

// Four-bit codes, in chunks of 128 columns. A lookup of words takes the lowest code of each word: four shifts, four
// parts.
struct Nibbles {
  static constexpr int64_t CHUNK = 128, PARTS = 4;
  static constexpr bool SHIFTED = false;
  static constexpr float SHIFT = 0;
  __m512i table;

  explicit Nibbles(const Quantized &w) {
    BFloat16 numbers[32];  // an index has five bits, and the highest is that of the next code
    for (int i = 0; i < 32; ++i) store(w.table()[i % 16], numbers + i);
    table = _mm512_loadu_si512(numbers);
  }

  void decode(__m512i codes, __m512bh (&parts)[PARTS]) const {
    UNROLL for (int part = 0; part < PARTS; ++part)
      parts[part] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * part), table);
  }

  // The places of 32 elements in the order of their parts.
  struct Places {
    uint16_t words[32];

    Places() {
      for (int part = 0; part < PARTS; ++part)
        for (int i = 0; i < 8; ++i) words[8 * part + i] = static_cast<uint16_t>(8 * (i / 2) + part + 4 * (i % 2));
    }
  };

  // Writes 128 elements in the order of `decode`: of each run of eight, elements i and i + 4 belong to part i.
  static void arrange(const BFloat16 *x, BFloat16 *out) {
    static const Places places;
    const __m512i by_part = _mm512_loadu_si512(places.words);
    for (int four = 0; four < 4; ++four) {  // four runs: eight elements of each part
      BFloat16 parts[32];
      _mm512_storeu_si512(parts, _mm512_permutexvar_epi16(by_part, _mm512_loadu_si512(x + 32 * four)));
      UNROLL for (int part = 0; part < PARTS; ++part) std::memcpy(out + 32 * part + 8 * four, parts + 8 * part, 16);
    }
  }
};

// The tokens of a step, arranged for a kind of codes, with the sums of their groups.
class Columns {
 public:
  template <typename Codes>
  void prepare(const Quantized &w, const BFloat16 *x, int64_t x_stride, int64_t tokens) {
    const bool shifted = Codes::SHIFTED || w.zeros;
    stride_ = (w.k + Codes::CHUNK - 1) / Codes::CHUNK * Codes::CHUNK;
    groups_ = (w.groups() + LANES - 1) / LANES * LANES;
    const size_t chunks = tokens * stride_ / 32;
    if (elements_.size() < chunks) elements_.resize(chunks);
    sums_.assign(shifted ? tokens * groups_ : 0, 0.0f);
    finite_.assign(tokens, true);
    for (int64_t t = 0; t < tokens; ++t) {
      const BFloat16 *row = x + t * x_stride;
      int64_t i = 0;
      for (; i + Codes::CHUNK <= w.k; i += Codes::CHUNK) Codes::arrange(row + i, mine(t) + i);
      if (i < w.k) {
        BFloat16 padded[Codes::CHUNK] = {};
        std::memcpy(padded, row + i, (w.k - i) * sizeof(BFloat16));
        Codes::arrange(padded, mine(t) + i);
      }
      if (shifted) add_groups(w, row, t);
    }
  }

  const BFloat16 *token(int64_t t) const { return elements_.data()->values + t * stride_; }
  // The sums of the token's groups, and zeros up to a multiple of LANES.
  const float *sums(int64_t t) const { return sums_.data() + t * groups_; }
  // Whether all of the token's elements are finite. It is true if sums are not needed.
  bool finite(int64_t t) const { return finite_[t]; }

 private:
  struct alignas(64) Line {  // loads across two lines of a cache take twice as long
    BFloat16 values[32];
  };

  BFloat16 *mine(int64_t t) { return elements_.data()->values + t * stride_; }

  void add_groups(const Quantized &w, const BFloat16 *row, int64_t t) {
    for (int64_t g = 0; g < w.groups(); ++g) {
      const int64_t end = (g + 1) * w.group < w.k ? (g + 1) * w.group : w.k;
      Vec total{};
      for (int64_t i = g * w.group; i < end; i += LANES) {
        total += i + LANES <= end ? load(row + i) : load_some(row + i, end - i);
      }
      sums_[t * groups_ + g] = sum(total);
    }
    uint16_t infinite = 0;  // by the exponent's bits, since compilers may take x * 0 for 0
    for (int64_t i = 0; i < w.k; ++i) infinite |= (row[i].bits & 0x7F80) == 0x7F80;
    finite_[t] = !infinite;
  }

  std::vector<Line> elements_;
  std::vector<float> sums_;
  std::vector<char> finite_;
  int64_t stride_ = 0, groups_ = 0;
};

// The scales of some rows as floats, and what is subtracted from the result for each unit of a group's sum.
struct RowScales {
  const float *scales[8];
  const float *shifts[8];

  RowScales(const Quantized &w, int64_t row, int64_t rows, float shift, bool shifted) {
    thread_local std::vector<float> made;
    const int64_t groups = w.groups(), width = (groups + LANES - 1) / LANES * LANES;
    const bool given = w.scale_type == SCALE_F32;
    made.assign((!given + shifted) * rows * width, 0.0f);
    float *next = made.data();
    for (int64_t r = 0; r < rows; ++r) {
      scales[r] = given ? static_cast<const float *>(w.scales) + w.place(row + r, 0) : next;
      if (!given) {
        for (int64_t g = 0; g < groups; ++g) next[g] = w.scale(row + r, g);
        next += width;
      }
      if (!shifted) continue;
      shifts[r] = next;
      for (int64_t g = 0; g < groups; ++g) next[g] = scales[r][g] * (w.zero(row + r, g) + shift);
      next += width;
    }
  }
};

// The product of arranged tokens with a weight. With GROUPED, each sum of a chunk is multiplied by the scales of its
// groups; else a row has one scale.
template <typename Codes, bool GROUPED>
struct Product {
  const Quantized &w;
  const Codes &codes;
  const Columns &columns;

  static constexpr int64_t CHUNK = Codes::CHUNK, PARTS = Codes::PARTS;
  static constexpr int64_t BYTES = 64;  // of a chunk
  // Measured with weights [8192, 2048] in memory, one token, two shared cores (Zen 4), the least of some hundred runs,
  // variants in turn. 32 kB: 468 us with int8, 294 us with int4. 16 kB: 500 and 302. 64 kB: 510 and 320. 128 kB: 514 and
  // 350. No prefetch: 750 and 528.
  static constexpr int64_t AHEAD = 1 << 15;
  // Rows that are decoded together for many tokens, and chunks of a block of them: 2048 columns. They take 16 kB, as do
  // the columns of four tokens: both fit into an L1 cache. Half as many columns take 1.05 of the time for 16 tokens.
  static constexpr int64_t ROWS = 4, BLOCK = 2048 / CHUNK;
  static constexpr int64_t TOKENS = 64;
  // For more tokens, rows with one scale are decoded in the L1 cache. Measured on one shared core, with five shapes of up
  // to [2048, 2048]: 16 tokens take 0.80 to 0.87 of the time in registers, 8 tokens 0.90 to 1.01, 5 tokens with K = 256
  // 0.88, 6 tokens with K = 2048 1.07. Rows with groups have a multiplication for each of them, and stay in registers for
  // any number.
  static constexpr int64_t FEW = 7;
  // From this number of tokens on, rows with groups are taken in pairs, so that a lookup serves eight tokens in place of
  // four. With K = 256, 16 tokens take 0.84 of the time; with K = 2048 the time is the same.
  static constexpr int64_t EIGHT = 8;

  bool shifted() const { return Codes::SHIFTED || w.zeros; }

  // Asks for the line that lies AHEAD after `place` in memory. A tile reads several rows in turn, which hardware does not
  // foresee. Asking line after line, whatever the order of reads, doubles the speed of int8.
  static void prefetch(const uint8_t *place) { _mm_prefetch(place + AHEAD, _MM_HINT_T1); }

  // Loads a chunk of which `left` bytes belong to the row.
  static __m512i load_codes(const uint8_t *place, int64_t left) {
    return _mm512_maskz_loadu_epi8(left < BYTES ? (__mmask64{1} << left) - 1 : ~__mmask64{0}, place);
  }

  // The scale of each lane of a chunk's sums.
  struct Spread {
    __m512i lanes;
    int64_t groups, per_chunk, per_group;

    explicit Spread(const Quantized &w) : groups(w.groups()) {
      per_chunk = w.group < CHUNK ? CHUNK / w.group : 1;
      per_group = w.group < CHUNK ? 1 : w.group / CHUNK;
      int32_t places[LANES];
      for (int64_t i = 0; i < LANES; ++i) places[i] = static_cast<int32_t>(i * per_chunk / LANES);
      lanes = _mm512_loadu_si512(places);
    }

    __m512 of(const float *scales, int64_t chunk) const {
      const int64_t first = per_chunk == 1 ? chunk / per_group : chunk * per_chunk;
      const int64_t left = groups - first, count = left < per_chunk ? left : per_chunk;
      const __m512 some = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), scales + first);
      return _mm512_permutexvar_ps(lanes, some);
    }
  };

  static __m512 add(__m512 total, const __m512bh (&parts)[PARTS], const BFloat16 *x) {
    UNROLL for (int p = 0; p < PARTS; ++p)
      total = _mm512_dpbf16_ps(total, parts[p], (__m512bh)_mm512_loadu_si512(x + 32 * p));
    return total;
  }

  static __m512 add_chunk(__m512 total, const __m512bh (&parts)[PARTS], const BFloat16 *x, __m512 scale) {
    if constexpr (!GROUPED) return add(total, parts, x);
    return _mm512_fmadd_ps(add(_mm512_setzero_ps(), parts, x), scale, total);
  }

  // Scales the total of a row and token, if groups did not, and subtracts what zero points and `Codes` add.
  float scaled(float total, const RowScales &scales, int64_t r, int64_t t) const {
    if constexpr (!GROUPED) {
      const float product = total * scales.scales[r][0];
      return shifted() ? product - scales.shifts[r][0] * columns.sums(t)[0] : product;
    }
    if (!shifted()) return total;
    Vec shift{};
    const float *sums = columns.sums(t);
    for (int64_t g = 0; g < w.groups(); g += LANES) shift += load(scales.shifts[r] + g) * load(sums + g);
    return total - sum(shift);
  }

  // COUNT rows for COLS tokens from `token` on, decoded in registers.
  template <int COUNT, int COLS, typename F>
  void tile(int64_t row, int64_t token, const F &finish) const {
    const RowScales scales(w, row, COUNT, Codes::SHIFT, shifted());
    const Spread spread(w);
    const Codes decoder = codes;
    const uint8_t *first = w.row(row);
    const int64_t row_bytes = w.row_bytes(), chunks = (w.k + CHUNK - 1) / CHUNK;
    const BFloat16 *x = columns.token(token);
    const int64_t x_stride = chunks * CHUNK;
    __m512 totals[COLS * COUNT] = {};
    const auto step = [&](int64_t chunk, auto load_at) {
      UNROLL for (int r = 0; r < COUNT; ++r) {
        __m512bh parts[PARTS];
        const uint8_t *place = first + r * row_bytes + chunk * BYTES;
        prefetch(first + (chunk * COUNT + r) * BYTES);
        decoder.decode(load_at(place), parts);
        const __m512 scale = GROUPED ? spread.of(scales.scales[r], chunk) : __m512{};
        UNROLL for (int c = 0; c < COLS; ++c)
          totals[c * COUNT + r] = add_chunk(totals[c * COUNT + r], parts, x + c * x_stride + chunk * CHUNK, scale);
      }
    };
    const int64_t whole = row_bytes / BYTES;
    for (int64_t chunk = 0; chunk < whole; ++chunk)
      step(chunk, [](const uint8_t *place) { return _mm512_loadu_si512(place); });
    if (whole < chunks) {
      const __mmask64 mask = (__mmask64{1} << (row_bytes - whole * BYTES)) - 1;
      step(whole, [mask](const uint8_t *place) { return _mm512_maskz_loadu_epi8(mask, place); });
    }
    Vec results[COLS * COUNT];
    UNROLL for (int i = 0; i < COLS * COUNT; ++i) results[i] = (Vec)totals[i];
    const Vec sums = sums_of<COLS * COUNT>(results);
    for (int c = 0; c < COLS; ++c)
      for (int r = 0; r < COUNT; ++r) finish(scaled(sums[c * COUNT + r], scales, r, token + c), row + r, token + c);
  }

  template <int COUNT, typename F>
  void tiles(int64_t row, int64_t tokens, const F &finish) const {
    int64_t token = 0;
    if constexpr (COUNT == 2)
      for (; token + EIGHT <= tokens; token += EIGHT) tile<COUNT, EIGHT>(row, token, finish);
    for (; token + 4 <= tokens; token += 4) tile<COUNT, 4>(row, token, finish);
    if (token + 2 <= tokens) tile<COUNT, 2>(row, token, finish), token += 2;
    if (token < tokens) tile<COUNT, 1>(row, token, finish);
  }

  struct Decoded {
    __m512bh parts[BLOCK][ROWS][PARTS];
  };

  // Adds the products of a block to `sums`; with `first`, writes them there.
  template <int COLS>
  static void add_block(Vec (*sums)[ROWS], bool first, const Decoded &decoded, const BFloat16 *x, int64_t x_stride,
                        int64_t chunks) {
    __m512 totals[COLS][ROWS];
    UNROLL for (int c = 0; c < COLS; ++c)
      UNROLL for (int r = 0; r < ROWS; ++r) totals[c][r] = first ? __m512{} : (__m512)sums[c][r];
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      UNROLL for (int p = 0; p < PARTS; ++p)
        UNROLL for (int c = 0; c < COLS; ++c) {
          const __m512bh column = (__m512bh)_mm512_loadu_si512(x + c * x_stride + chunk * CHUNK + 32 * p);
          UNROLL for (int r = 0; r < ROWS; ++r)
            totals[c][r] = _mm512_dpbf16_ps(totals[c][r], decoded.parts[chunk][r][p], column);
        }
    UNROLL for (int c = 0; c < COLS; ++c)
      UNROLL for (int r = 0; r < ROWS; ++r) sums[c][r] = (Vec)totals[c][r];
  }

  // ROWS rows for `tokens` tokens, decoded once.
  template <typename F>
  void many(int64_t row, int64_t tokens, const F &finish) const {
    const RowScales scales(w, row, ROWS, Codes::SHIFT, shifted());
    Decoded decoded;
    Vec sums[TOKENS][ROWS];
    const int64_t chunks = (w.k + CHUNK - 1) / CHUNK, x_stride = chunks * CHUNK;
    for (int64_t begin = 0; begin < chunks; begin += BLOCK) {
      const int64_t some = begin + BLOCK < chunks ? BLOCK : chunks - begin;
      for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t chunk = 0; chunk < some; ++chunk) {
          const int64_t at = (begin + chunk) * BYTES;
          prefetch(w.row(row) + (begin * ROWS + r * some + chunk) * BYTES);
          codes.decode(load_codes(w.row(row + r) + at, w.row_bytes() - at), decoded.parts[chunk][r]);
        }
      const BFloat16 *x = columns.token(0) + begin * CHUNK;
      int64_t t = 0;
      for (; t + 4 <= tokens; t += 4) add_block<4>(sums + t, begin == 0, decoded, x + t * x_stride, x_stride, some);
      for (; t < tokens; ++t) add_block<1>(sums + t, begin == 0, decoded, x + t * x_stride, x_stride, some);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec totals = sums_of<ROWS>(sums[t]);
      for (int r = 0; r < ROWS; ++r) finish(scaled(totals[r], scales, r, t), row + r, t);
    }
  }

  // Calls finish(result, row, token) for rows [begin, end) and all tokens.
  template <typename F>
  void rows(int64_t begin, int64_t end, int64_t tokens, const F &finish) const {
    int64_t row = begin;
    if constexpr (!GROUPED)
      if (tokens > FEW)
        for (; row + ROWS <= end; row += ROWS) many(row, tokens, finish);
    if (GROUPED && tokens >= EIGHT)
      for (; row + 2 <= end; row += 2) tiles<2>(row, tokens, finish);
    if (tokens == 1)
      for (; row + 8 <= end; row += 8) tile<8, 1>(row, 0, finish);
    for (; row + 4 <= end; row += 4) tiles<4>(row, tokens, finish);
    for (; row < end; ++row) tiles<1>(row, tokens, finish);
  }
};

}  // namespace

#endif
