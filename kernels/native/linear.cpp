// Linear layers. A weight is read from memory once, sequentially, for any number of tokens.
//
// A weight [N, K] is packed in panels of 64 outputs. Each row of a panel holds one input per output in float32, two in
// bfloat16 and four in int8; the inputs of one output are adjacent. The layouts of float32 and bfloat16 are oneDNN's.
#include <type_traits>
#include <utility>

#include "constants.h"
#include "ops.h"
#include "thread_pool.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Accumulators (tokens times vectors) that are kept in registers. AVX2 has 16 registers, the others 32; on the others
// the few that spill at 8 times 4 cost less than a second pass.
constexpr int MAX_ACCUMULATORS = LANES == 16 ? 32 : LANES == 8 ? 12 : 24;
// Tokens per pass over a panel.
constexpr int MAX_GROUP = LANES == 16 ? 8 : 6;
// Rows per pass where a panel needs several passes: so many stay in the L1 cache.
constexpr int64_t PASS_ROWS = 64;
// A single token is bound by memory: the weight is prefetched this many bytes ahead, without keeping it in the cache.
// That is 2 to 4 % faster than the hardware prefetcher alone; from two tokens on it gains nothing.
constexpr int64_t PREFETCH_BYTES = 4096;

// Formats of a packed weight. Number: the stored type; Input: the type of the tokens; INPUTS: inputs per row;
// Columns: the numbers of one row for LANES outputs, in registers.
struct F32 {
  using Number = float;
  using Input = float;
  using Columns = Vec;
  static constexpr int INPUTS = 1;

  static Columns columns(const Number* row) { return load(row); }
  static void add(Vec& sums, Columns w, const Input* x) { sums += *x * w; }
  static float widen(Number w) { return w; }
};

struct I8 {
  using Number = int8_t;
  using Input = float;
  struct Columns {
    Vec part[4];
  };
  static constexpr int INPUTS = 4;

  static Columns columns(const Number* row) {
    IntVec fours;
    memcpy(&fours, row, sizeof fours);
    Columns w;
    for (int i = 0; i < 4; i++) w.part[i] = __builtin_convertvector(fours << (24 - 8 * i) >> 24, Vec);
    return w;
  }
  static void add(Vec& sums, const Columns& w, const Input* x) {
    for (int i = 0; i < 4; i++) sums += x[i] * w.part[i];
  }
  static float widen(Number w) { return w; }
};

#if defined(__AVX512BF16__)
// One instruction multiplies pairs of bfloat16 and adds both products to a float32.
struct BF16 {
  using Number = bf16;
  using Input = bf16;
  using Columns = __m512bh;
  static constexpr int INPUTS = 2;

  static Columns columns(const Number* row) {
    Columns pairs;
    memcpy(&pairs, row, sizeof pairs);
    return pairs;
  }
  static void add(Vec& sums, Columns w, const Input* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    sums = (Vec)_mm512_dpbf16_ps((__m512)sums, w, (__m512bh)_mm512_set1_epi32(pair));
  }
  static float widen(Number w) { return to_float(w); }
};
#else
struct BF16 {
  using Number = bf16;
  using Input = float;
  struct Columns {
    Vec even, odd;
  };
  static constexpr int INPUTS = 2;

  static Columns columns(const Number* row) {
    BitVec pairs;
    memcpy(&pairs, row, sizeof pairs);
    const BitVec low = pairs << 16, high = pairs & 0xFFFF0000u;
    Columns w;
    memcpy(&w.even, &low, sizeof low);
    memcpy(&w.odd, &high, sizeof high);
    return w;
  }
  static void add(Vec& sums, Columns w, const Input* x) { sums += x[0] * w.even + x[1] * w.odd; }
  static float widen(Number w) { return to_float(w); }
};
#endif

// A packed weight.
template <typename Format>
struct Panels {
  const typename Format::Number* data;
  int64_t stride;       // numbers per panel
  int64_t in_features;  // a multiple of Format::INPUTS
  int64_t out_features;
  const float* scales;  // [N], multiply the products; or null
};

// Vectors of a panel that are computed in one pass over m tokens.
constexpr int pass_vectors(int m) {
  int width = PANEL_LEN / LANES;
  while (width > 1 && width * m > MAX_ACCUMULATORS) width /= 2;
  return width;
}

// W LANES columns of a panel: y[m][0:W LANES] += sum of x[m] * row over rows begin to end.
template <typename Format, int M, int W>
void add_columns(const typename Format::Input* x, const typename Format::Number* weight, int64_t in_features,
                 int64_t begin, int64_t end, float* y) {
  constexpr int INPUTS = Format::INPUTS;
  Vec acc[M][W];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) acc[m][i] = load(y + m * PANEL_LEN + i * LANES);
  for (int64_t row = begin; row < end; row++) {
    typename Format::Columns w[W];
    for (int i = 0; i < W; i++) {
      const auto* columns = weight + (row * PANEL_LEN + i * LANES) * INPUTS;
      if (M == 1) __builtin_prefetch((const char*)columns + PREFETCH_BYTES, 0, 0);
      w[i] = Format::columns(columns);
    }
    for (int m = 0; m < M; m++)
      for (int i = 0; i < W; i++) Format::add(acc[m][i], w[i], x + m * in_features + row * INPUTS);
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) store(y + m * PANEL_LEN + i * LANES, acc[m][i]);
}

// One panel: y[m][0:PANEL_LEN] = sum of x[m] * row over all rows.
template <typename Format, int M>
void panel_product(const typename Format::Input* x, const typename Format::Number* weight, int64_t in_features,
                   float* y) {
  constexpr int W = pass_vectors(M);
  const int64_t rows = in_features / Format::INPUTS;
  const int64_t pass_rows = W * LANES == PANEL_LEN ? rows : PASS_ROWS;
  memset(y, 0, M * PANEL_LEN * sizeof(float));
  for (int64_t begin = 0; begin < rows; begin += pass_rows) {
    const int64_t end = std::min(begin + pass_rows, rows);
    for (int column = 0; column < PANEL_LEN; column += W * LANES)
      add_columns<Format, M, W>(x, weight + column * Format::INPUTS, in_features, begin, end, y + column);
  }
}

template <typename Format>
using PanelProduct = decltype(&panel_product<Format, 1>);

template <typename Format, int... M>
PanelProduct<Format> product_of(int64_t num_tokens, std::integer_sequence<int, M...>) {
  constexpr PanelProduct<Format> products[] = {panel_product<Format, M + 1>...};
  return products[num_tokens - 1];
}

// y [T, N] = x [T, K] times the transpose of the weight, plus bias [N] unless that is null.
template <typename Format, typename T>
void multiply(const Panels<Format>& weight, const typename Format::Input* x, const T* bias, T* y, int64_t num_tokens,
              int threads) {
  const int64_t in_features = weight.in_features, out_features = weight.out_features;
  const int64_t num_panels = (out_features + PANEL_LEN - 1) / PANEL_LEN;
  parallel_for(num_panels, num_tokens, threads, [&](auto& next) {
    float out[MAX_GROUP * PANEL_LEN], scales[PANEL_LEN], offsets[PANEL_LEN];
    for (int64_t p; (p = next()) < num_panels;) {
      const int64_t begin = p * PANEL_LEN, width = std::min<int64_t>(PANEL_LEN, out_features - begin);
      for (int64_t n = 0; n < width; n++) {
        scales[n] = weight.scales ? weight.scales[begin + n] : 1.f;
        offsets[n] = bias ? to_float(bias[begin + n]) : 0.f;
      }
      // The first group of tokens reads the panel from memory, later groups from the cache.
      for (int64_t first = 0; first < num_tokens; first += MAX_GROUP) {
        const int64_t count = std::min<int64_t>(num_tokens - first, MAX_GROUP);
        const auto product = product_of<Format>(count, std::make_integer_sequence<int, MAX_GROUP>());
        product(x + first * in_features, weight.data + p * weight.stride, in_features, out);
        for (int64_t m = 0; m < count; m++) {
          T* to = y + (first + m) * out_features + begin;
          const float* sums = out + m * PANEL_LEN;
          int64_t n = 0;
          for (; n + LANES <= width; n += LANES)
            store(to + n, load(sums + n) * load(scales + n) + load(offsets + n));
          for (; n < width; n++) store_one(to + n, sums[n] * scales[n] + offsets[n]);
        }
      }
    }
  });
}

// x [T, K] and y [T, N] of one type.
template <typename Format, typename T>
void linear(const Panels<Format>& weight, const T* x, const T* bias, T* y, int64_t num_tokens, int threads) {
  if constexpr (std::is_same_v<T, typename Format::Input>) {
    multiply(weight, x, bias, y, num_tokens, threads);
  } else {
    std::vector<float> widened(num_tokens * weight.in_features);
    for (size_t i = 0; i < widened.size(); i++) widened[i] = to_float(x[i]);
    multiply(weight, widened.data(), bias, y, num_tokens, threads);
  }
}

// out [T, K]: rows `ids` [T] of the weight.
template <typename Format, typename T>
void gather_rows(const Panels<Format>& weight, const int64_t* ids, T* out, int64_t count, int threads) {
  constexpr int INPUTS = Format::INPUTS;
  parallel_for(count, count, count * weight.in_features < 16384 ? 1 : threads, [&](auto& next) {
    for (int64_t t; (t = next()) < count;) {
      const auto* column = weight.data + ids[t] / PANEL_LEN * weight.stride + ids[t] % PANEL_LEN * INPUTS;
      const float scale = weight.scales ? weight.scales[ids[t]] : 1.f;
      for (int64_t k = 0; k < weight.in_features; k++) {
        const auto number = column[k / INPUTS * PANEL_LEN * INPUTS + k % INPUTS];
        store_one(out + t * weight.in_features + k, Format::widen(number) * scale);
      }
    }
  });
}

// Calls body(format) with the format of a weight dtype: float32, bfloat16 or int8.
template <typename Body>
void for_format(int weight_dtype, const Body& body) {
  if (weight_dtype == FLOAT32)
    body(F32{});
  else if (weight_dtype == BFLOAT16)
    body(BF16{});
  else
    body(I8{});
}

}  // namespace

extern "C" {

// `dtype` is that of x, bias and y: float32 or bfloat16. A weight in float32 or bfloat16 requires tokens of its own
// dtype.
void quire_linear(int weight_dtype, int dtype, const void* x, const void* panels, const float* scales, const void* bias,
                  void* y, int64_t num_tokens, int64_t in_features, int64_t out_features, int64_t panel_stride,
                  int threads) {
  for_format(weight_dtype, [&](auto format) {
    using Format = decltype(format);
    using Number = typename Format::Number;
    const Panels<Format> weight{(const Number*)panels, panel_stride, in_features, out_features, scales};
    if constexpr (!std::is_same_v<Number, bf16>)
      if (dtype == FLOAT32) return linear(weight, (const float*)x, (const float*)bias, (float*)y, num_tokens, threads);
    if constexpr (!std::is_same_v<Number, float>)
      linear(weight, (const bf16*)x, (const bf16*)bias, (bf16*)y, num_tokens, threads);
  });
}

void quire_gather_rows(int weight_dtype, int dtype, const void* panels, const float* scales, const int64_t* ids,
                       void* out, int64_t count, int64_t in_features, int64_t panel_stride, int threads) {
  for_format(weight_dtype, [&](auto format) {
    using Format = decltype(format);
    const Panels<Format> weight{(const typename Format::Number*)panels, panel_stride, in_features, 0, scales};
    if (dtype == BFLOAT16)
      gather_rows(weight, ids, (bf16*)out, count, threads);
    else
      gather_rows(weight, ids, (float*)out, count, threads);
  });
}
}
