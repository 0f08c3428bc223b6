// Low-rank adapters of linear layers: y += B (A x) for the tokens of many adapters.
//
// Each group of tokens is one task: its product with A stays in the cache until it is multiplied with B. A tile of
// tokens times rows of A, or times vectors of B, stays in registers. The products of an output are added in the same
// order for any number of tokens, so a token's result does not depend on the others.
#include "lora.h"

#include <algorithm>
#include <vector>

#include "constants.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

// Tokens and rows of A of a tile, whose sums fill half of the registers.
constexpr int TILE_TOKENS = NUM_REGISTERS == 32 ? 4 : 2;
constexpr int TILE_ROWS = 4;
// Vectors of B of a tile. More than this reads shorter runs of more rows of B at a time.
constexpr int TILE_VECTORS = 4;

// low [M, stride] = x [M, K] times R rows of A.
template <int M, int R, typename T>
void shrink_tile(const T* const* x, const T* a, int64_t in_features, float* low, int64_t stride) {
  Vec sums[M][R] = {};
  int64_t k = 0;
  const auto add = [&](const auto& read) {
    Vec inputs[M];
    for (int m = 0; m < M; m++) inputs[m] = read(x[m] + k);
    for (int r = 0; r < R; r++) {
      const Vec row = read(a + r * in_features + k);
      for (int m = 0; m < M; m++) sums[m][r] = multiply_add(inputs[m], row, sums[m][r]);
    }
  };
  for (; k + LANES <= in_features; k += LANES) add([](const T* from) { return load(from); });
  if (k < in_features)
    add([&](const T* from) {
      T rest[LANES] = {};
      std::copy_n(from, in_features - k, rest);
      return load(rest);
    });
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) low[m * stride + r] = sum_of(sums[m][r]);
}

template <int M, typename T>
void shrink(const T* const* x, const T* a, int64_t in_features, int64_t rank, float* low, int64_t stride) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rank; r += TILE_ROWS)
    shrink_tile<M, TILE_ROWS>(x, a + r * in_features, in_features, low + r, stride);
  for (; r < rank; r++) shrink_tile<M, 1>(x, a + r * in_features, in_features, low + r, stride);
}

// y [M, W vectors] += low [M, rank] times columns of B.
template <int M, int W, typename T>
void expand_tile(T* const* y, int64_t first, const T* b, int64_t b_stride, int64_t rank, const float* low,
                 int64_t stride) {
  Vec sums[M][W];
  for (int m = 0; m < M; m++)
    for (int w = 0; w < W; w++) sums[m][w] = load(y[m] + first + w * LANES);
  for (int64_t r = 0; r < rank; r++)
    for (int w = 0; w < W; w++) {
      const Vec column = load(b + r * b_stride + first + w * LANES);
      for (int m = 0; m < M; m++) sums[m][w] = multiply_add(low[m * stride + r], column, sums[m][w]);
    }
  for (int m = 0; m < M; m++)
    for (int w = 0; w < W; w++) store(y[m] + first + w * LANES, sums[m][w]);
}

template <int M, typename T>
void expand(T* const* y, int64_t first, int64_t end, const T* b, int64_t b_stride, int64_t rank, const float* low,
            int64_t stride) {
  for (; first + TILE_VECTORS * LANES <= end; first += TILE_VECTORS * LANES)
    expand_tile<M, TILE_VECTORS>(y, first, b, b_stride, rank, low, stride);
  for (; first + LANES <= end; first += LANES) expand_tile<M, 1>(y, first, b, b_stride, rank, low, stride);
  for (; first < end; first++)
    for (int m = 0; m < M; m++) {
      float sum = to_float(y[m][first]);
      for (int64_t r = 0; r < rank; r++) sum = multiply_add(low[m * stride + r], to_float(b[r * b_stride + first]), sum);
      store_one(y[m] + first, sum);
    }
}

// The adapter in `slot`, for M tokens.
template <int M, typename T>
void add_adapter(const LoraFactors& factors, int64_t slot, const T* const* x, T* const* y, float* low) {
  const int64_t K = factors.in_features, N = factors.out_features, R = factors.max_rank, P = factors.num_parts;
  const T* a = (const T*)factors.a + slot * P * R * K;
  const T* b = (const T*)factors.b + slot * R * N;
  for (int64_t part = 0; part < P; part++) {
    const int64_t rank = factors.ranks[slot * P + part];
    if (!rank) continue;
    shrink<M>(x, a + part * R * K, K, rank, low, R);
    expand<M>(y, factors.starts[part], factors.starts[part + 1], b, N, rank, low, R);
  }
}

template <typename T>
void add_group(const LoraFactors& factors, const LoraGroups& groups, int64_t group, const T* x, T* y, float* low) {
  const int64_t slot = groups.slots[group], end = groups.starts[group + 1];
  int64_t i = groups.starts[group];
  const auto add = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; i + M <= end; i += M) {
      const T* inputs[M];
      T* outputs[M];
      for (int m = 0; m < M; m++) {
        inputs[m] = x + groups.inputs[i + m] * factors.in_features;
        outputs[m] = y + groups.order[i + m] * factors.out_features;
      }
      add_adapter<M>(factors, slot, inputs, outputs, low);
    }
  };
  add(std::integral_constant<int, TILE_TOKENS>{});
  add(std::integral_constant<int, 1>{});
}

template <typename T>
void add_lora(const LoraFactors& factors, const LoraGroups& groups, const T* x, T* y, int threads) {
  parallel_for(groups.count, threads, [&](auto& next) {
    thread_local std::vector<float> low;
    low.resize(std::max<size_t>(low.size(), TILE_TOKENS * factors.max_rank));
    for (int64_t group; (group = next()) < groups.count;) add_group(factors, groups, group, x, y, low.data());
  });
}

}  // namespace

extern "C" {

int64_t quire_lora_bytes() { return sizeof(LoraFactors) + sizeof(LoraGroups); }

// `dtype` is that of x [T, K], y [T, N] and the factors.
void quire_add_lora(int dtype, const LoraFactors* factors, const LoraGroups* groups, const void* x, void* y,
                    int threads) {
  with_dtype(dtype, [&](auto t) {
    add_lora(*factors, *groups, (const decltype(t)*)x, (decltype(t)*)y, threads);
  });
}
}
