// Linear layers: a weight is read once from memory, in the order in which it lies, however many tokens there are.
#include <utility>

#include "vector.h"

namespace {

constexpr int PANEL = 64;

// Sums that are kept in registers, of tokens times vectors. AVX2 has 16 registers, the others 32; there the few that
// spill at 8 times 4 cost less than a second pass.
constexpr int SUMS = LANES == 16 ? 32 : LANES == 8 ? 12 : 24;
constexpr int MAX_GROUP = LANES == 16 ? 8 : 6;
// Where a panel takes several passes they follow each other in pieces that stay in the first cache.
constexpr int64_t PIECE = 64;

// Vectors of a panel that M tokens compute in one pass.
constexpr int width_of(int m) {
  int width = PANEL / LANES;
  while (width > 1 && width * m > SUMS) width /= 2;
  return width;
}

// Columns of a panel, a vector of W: y[m][0:W LANES] += sum over k of x[m][k] * weight[k][0:W LANES].
template <int M, int W>
void add_columns(const float* x, const float* weight, int64_t in_features, int64_t begin, int64_t end, float* y) {
  Vec acc[M][W];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) acc[m][i] = load(y + m * PANEL + i * LANES);
  for (int64_t k = begin; k < end; k++) {
    Vec w[W];
    for (int i = 0; i < W; i++) w[i] = load(weight + k * PANEL + i * LANES);
    for (int m = 0; m < M; m++)
      for (int i = 0; i < W; i++) acc[m][i] += x[m * in_features + k] * w[i];
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) store(y + m * PANEL + i * LANES, acc[m][i]);
}

// One panel: y[m][0:PANEL] = sum over k of x[m][k] * weight[k][0:PANEL].
template <int M>
void panel_product(const float* x, const float* weight, int64_t in_features, float* y) {
  constexpr int W = width_of(M);
  const int64_t piece = W * LANES == PANEL ? in_features : PIECE;
  memset(y, 0, M * PANEL * sizeof(float));
  for (int64_t begin = 0; begin < in_features; begin += piece) {
    const int64_t end = begin + piece < in_features ? begin + piece : in_features;
    for (int column = 0; column < PANEL; column += W * LANES)
      add_columns<M, W>(x, weight + column, in_features, begin, end, y + column);
  }
}

using PanelProduct = decltype(&panel_product<1>);

template <int... M>
PanelProduct product_of(int64_t num_tokens, std::integer_sequence<int, M...>) {
  constexpr PanelProduct products[] = {panel_product<M + 1>...};
  return products[num_tokens - 1];
}

}  // namespace

// y [M, N] = x [M, K] times the transpose of a weight [N, K] that is stored as panels [N / 64, padded K, 64].
extern "C" void quire_linear_f32(const float* x, const float* panels, const float* bias, float* y, int64_t num_tokens,
                                 int64_t in_features, int64_t out_features, int64_t panel_stride, int threads) {
  const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < num_panels; p++) {
    const int64_t begin = p * PANEL, end = begin + PANEL < out_features ? begin + PANEL : out_features;
    // The first group of tokens reads the panel from memory, the others from the processor's cache.
    for (int64_t first = 0; first < num_tokens; first += MAX_GROUP) {
      const int64_t count = num_tokens - first < MAX_GROUP ? num_tokens - first : MAX_GROUP;
      const PanelProduct product = product_of(count, std::make_integer_sequence<int, MAX_GROUP>());
      float out[MAX_GROUP * PANEL];
      product(x + first * in_features, panels + p * panel_stride, in_features, out);
      for (int64_t m = 0; m < count; m++)
        for (int64_t n = begin; n < end; n++)
          y[(first + m) * out_features + n] = out[m * PANEL + n - begin] + (bias ? bias[n] : 0.f);
    }
  }
}
