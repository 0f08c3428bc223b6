// Linear layers: a weight is read once from memory, in the order in which it lies, however many tokens there are.
//
// A weight [N, K] lies as panels of 64 outputs, each a row of 64 after the other. A row is of one input in float32, of
// two in bfloat16 and of four in int8, the numbers of an output beside each other; the first two are oneDNN's layouts.
#include <type_traits>
#include <utility>

#include "ops.h"
#include "team.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 64;

// Sums that are kept in registers, of tokens times vectors. AVX2 has 16 registers, the others 32; there the few that
// spill at 8 times 4 cost less than a second pass.
constexpr int SUMS = LANES == 16 ? 32 : LANES == 8 ? 12 : 24;
constexpr int MAX_GROUP = LANES == 16 ? 8 : 6;
// Where a panel takes several passes they follow each other in pieces that stay in the first cache.
constexpr int64_t PIECE = 64;
// A single token waits for memory alone: what it reads is asked for so many bytes ahead, and not to be kept. That is 2
// to 4 % faster than what the processor guesses; from two tokens on it wins nothing.
constexpr int64_t AHEAD = 4096;

// How weights are stored. `Input` is what tokens are given as, `Columns` a row's numbers for LANES outputs, and a row
// belongs to INPUTS inputs.
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
// The processor multiplies pairs of bfloat16 and adds both products to a float.
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

// A linear layer's numbers.
template <typename Format>
struct Panels {
  const typename Format::Number* data;
  int64_t stride;       // numbers of a panel
  int64_t in_features;  // a multiple of Format::INPUTS
  int64_t out_features;
  const float* scales;  // [N], what products are multiplied by; or null
};

// Vectors of a panel that M tokens compute in one pass.
constexpr int width_of(int m) {
  int width = PANEL / LANES;
  while (width > 1 && width * m > SUMS) width /= 2;
  return width;
}

// Columns of a panel, a vector of W: y[m][0:W LANES] += sum over the rows of x[m] * row.
template <typename Format, int M, int W>
void add_columns(const typename Format::Input* x, const typename Format::Number* weight, int64_t in_features,
                 int64_t begin, int64_t end, float* y) {
  constexpr int INPUTS = Format::INPUTS;
  Vec acc[M][W];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) acc[m][i] = load(y + m * PANEL + i * LANES);
  for (int64_t row = begin; row < end; row++) {
    typename Format::Columns w[W];
    for (int i = 0; i < W; i++) {
      const auto* columns = weight + (row * PANEL + i * LANES) * INPUTS;
      if (M == 1) __builtin_prefetch((const char*)columns + AHEAD, 0, 0);
      w[i] = Format::columns(columns);
    }
    for (int m = 0; m < M; m++)
      for (int i = 0; i < W; i++) Format::add(acc[m][i], w[i], x + m * in_features + row * INPUTS);
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) store(y + m * PANEL + i * LANES, acc[m][i]);
}

// One panel: y[m][0:PANEL] = sum over the rows of x[m] * row.
template <typename Format, int M>
void panel_product(const typename Format::Input* x, const typename Format::Number* weight, int64_t in_features,
                   float* y) {
  constexpr int W = width_of(M);
  const int64_t rows = in_features / Format::INPUTS;
  const int64_t piece = W * LANES == PANEL ? rows : PIECE;
  memset(y, 0, M * PANEL * sizeof(float));
  for (int64_t begin = 0; begin < rows; begin += piece) {
    const int64_t end = std::min(begin + piece, rows);
    for (int column = 0; column < PANEL; column += W * LANES)
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

// y [M, N] = x [M, K] times the transpose of the weight, plus a bias [N] or null.
template <typename Format, typename T>
void multiply(const Panels<Format>& weight, const typename Format::Input* x, const T* bias, T* y, int64_t num_tokens,
              int threads) {
  const int64_t in_features = weight.in_features, out_features = weight.out_features;
  const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
  share_tasks(num_panels, num_tokens, threads, [&](auto& next) {
    float out[MAX_GROUP * PANEL], scales[PANEL], offsets[PANEL];
    for (int64_t p; (p = next()) < num_panels;) {
      const int64_t begin = p * PANEL, width = std::min<int64_t>(PANEL, out_features - begin);
      for (int64_t n = 0; n < width; n++) {
        scales[n] = weight.scales ? weight.scales[begin + n] : 1.f;
        offsets[n] = bias ? to_float(bias[begin + n]) : 0.f;
      }
      // The first group of tokens reads the panel from memory, the others from the processor's cache.
      for (int64_t first = 0; first < num_tokens; first += MAX_GROUP) {
        const int64_t count = std::min<int64_t>(num_tokens - first, MAX_GROUP);
        const auto product = product_of<Format>(count, std::make_integer_sequence<int, MAX_GROUP>());
        product(x + first * in_features, weight.data + p * weight.stride, in_features, out);
        for (int64_t m = 0; m < count; m++) {
          T* to = y + (first + m) * out_features + begin;
          const float* sums = out + m * PANEL;
          int64_t n = 0;
          for (; n + LANES <= width; n += LANES)
            store(to + n, load(sums + n) * load(scales + n) + load(offsets + n));
          for (; n < width; n++) put(to + n, sums[n] * scales[n] + offsets[n]);
        }
      }
    }
  });
}

// x [M, K] and y [M, N] of one type.
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

// Rows of the weight, out [T, K]; ids [T].
template <typename Format, typename T>
void gather_rows(const Panels<Format>& weight, const int64_t* ids, T* out, int64_t count, int threads) {
  constexpr int INPUTS = Format::INPUTS;
  share_tasks(count, count, count * weight.in_features < 16384 ? 1 : threads, [&](auto& next) {
    for (int64_t t; (t = next()) < count;) {
      const auto* column = weight.data + ids[t] / PANEL * weight.stride + ids[t] % PANEL * INPUTS;
      const float scale = weight.scales ? weight.scales[ids[t]] : 1.f;
      for (int64_t k = 0; k < weight.in_features; k++) {
        const auto number = column[k / INPUTS * PANEL * INPUTS + k % INPUTS];
        put(out + t * weight.in_features + k, Format::widen(number) * scale);
      }
    }
  });
}

// Calls with(format) for how a weight is stored.
template <typename With>
void for_format(int stored, const With& with) {
  if (stored == 0)
    with(F32{});
  else if (stored == 1)
    with(BF16{});
  else
    with(I8{});
}

}  // namespace

extern "C" {

// Up to how many tokens this is the fastest: see team.h.
int64_t quire_max_linear_tokens() { return MAX_TEAM_TOKENS; }

// Tokens, biases and results are bfloat16 or float; a weight in bfloat16 takes tokens in it alone.
void quire_linear(int stored, int is_bf16, const void* x, const void* panels, const float* scales, const void* bias,
                  void* y, int64_t num_tokens, int64_t in_features, int64_t out_features, int64_t panel_stride,
                  int threads) {
  for_format(stored, [&](auto format) {
    using Format = decltype(format);
    using Number = typename Format::Number;
    const Panels<Format> weight{(const Number*)panels, panel_stride, in_features, out_features, scales};
    if constexpr (!std::is_same_v<Number, bf16>)
      if (!is_bf16) return linear(weight, (const float*)x, (const float*)bias, (float*)y, num_tokens, threads);
    if constexpr (!std::is_same_v<Number, float>)
      linear(weight, (const bf16*)x, (const bf16*)bias, (bf16*)y, num_tokens, threads);
  });
}

void quire_panel_rows(int stored, int is_bf16, const void* panels, const float* scales, const int64_t* ids, void* out,
                      int64_t count, int64_t in_features, int64_t panel_stride, int threads) {
  for_format(stored, [&](auto format) {
    using Format = decltype(format);
    const Panels<Format> weight{(const typename Format::Number*)panels, panel_stride, in_features, 0, scales};
    if (is_bf16)
      gather_rows(weight, ids, (bf16*)out, count, threads);
    else
      gather_rows(weight, ids, (float*)out, count, threads);
  });
}
}
