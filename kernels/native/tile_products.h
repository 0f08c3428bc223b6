// Products of tokens in bfloat16 and rows of a panel in tile registers (matrix_tiles.h). A row of a panel has pairs of
// adjacent inputs, as a tile of a weight does, so tiles are read from panels in place.
#pragma once

#include <algorithm>

#include "matrix_tiles.h"
#include "packed_weights.h"

#if defined(QUIRE_HAS_TILES)

static_assert(PANEL_LEN % TILE_OUTPUTS == 0);
constexpr int PANEL_TILES = PANEL_LEN / TILE_OUTPUTS;
constexpr int64_t PANEL_ROW_BYTES = PANEL_LEN * 2 * sizeof(bf16);
// Tokens whose sums are in registers at a time: two tiles of tokens by two of outputs, so that each tile that is read
// takes part in two products. At most TILE_TOKENS are multiplied by all outputs of a panel at once.
constexpr int64_t GROUP_TOKENS = 2 * TILE_TOKENS;
constexpr int PAIR_TILES = std::min(2, PANEL_TILES);

// The tile registers of the calling thread, for as long as this object lives. Tiles 0 to 3 are sums, 4 and 5 tokens, and
// 6 and 7 weights.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (num_tokens_) release_tiles();
  }

  // Sets the sizes for up to GROUP_TOKENS tokens and up to TILE_INPUTS inputs. It clears the registers and takes 180
  // cycles, so it does nothing if the sizes are set already.
  void resize(int64_t num_tokens, int64_t num_inputs) {
    if (num_tokens == num_tokens_ && num_inputs == num_inputs_) return;
    num_tokens_ = num_tokens, num_inputs_ = num_inputs;
    const int first = int(std::min<int64_t>(num_tokens, TILE_TOKENS)), second = int(num_tokens) - first;
    const int input_bytes = int(num_inputs) * int(sizeof(bf16)), output_bytes = TILE_OUTPUTS * int(sizeof(float));
    TileSizes sizes;
    for (int i = 0; i < 4; i++) sizes.set(i, second && i >= 2 ? second : first, output_bytes);
    sizes.set(4, first, input_bytes);
    if (second) sizes.set(5, second, input_bytes);
    for (int i : {6, 7}) sizes.set(i, int(num_inputs) / 2, output_bytes);
    set_tile_sizes(sizes);
  }

 private:
  int64_t num_tokens_ = 0, num_inputs_ = 0;
};

// Memory that is read next: `step` bytes of it are prefetched with each 32 inputs, until `end`.
struct AheadOfTiles {
  const char *next = nullptr, *end = nullptr;
  int64_t step = 0;

  void prefetch() {
    if (next >= end) return;
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += step;
  }
};

// Calls body(i) for i from 0 to N - 1.
template <typename Body, int... I>
inline void for_each_tile(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}

template <int N, typename Body>
inline void for_each_tile(const Body& body) {
  for_each_tile(body, std::make_integer_sequence<int, N>());
}

constexpr int64_t SUMS_STRIDE = PANEL_LEN * sizeof(float);
// Bytes that few tokens prefetch the panel ahead, into the first-level cache.
constexpr int64_t FEW_AHEAD_BYTES = 4096;

// Adds the product of at most TILE_TOKENS rows x and `steps` times 32 rows w, stored as pairs, to sums of N tiles; or
// replaces the sums. The strides are those of x's rows in numbers, of pairs of w's rows and of sums in bytes. Few tokens
// are bound by memory: with AHEAD_BYTES, w is prefetched so far ahead.
template <bool ADDS, int N, int64_t AHEAD_BYTES>
inline void add_row_of_tiles(const bf16* x, int64_t x_stride, const bf16* w, int64_t w_stride, int64_t steps, float* sums,
                             int64_t sums_stride) {
  for_each_tile<N>([&](auto i) {
    if constexpr (ADDS)
      load_tile<i()>(sums + i() * TILE_OUTPUTS, sums_stride);
    else
      clear_tile<i()>();
  });
  const char* weight = (const char*)w;
  const int64_t step_bytes = TILE_INPUTS / 2 * w_stride;
  for (int64_t step = 0; step < steps; step++, x += TILE_INPUTS, weight += step_bytes) {
    if constexpr (AHEAD_BYTES > 0)
      for (int64_t i = 0; i < step_bytes; i += 64) __builtin_prefetch(weight + AHEAD_BYTES + i, 0, 3);
    load_tile<4>(x, x_stride * sizeof(bf16));
    for_each_tile<N>([&](auto i) {
      load_tile<6 + i() % 2>(weight + i() * 64, w_stride);
      multiply_tiles<i(), 4, 6 + i() % 2>();
    });
  }
  for_each_tile<N>([&](auto i) { store_tile<i()>(sums + i() * TILE_OUTPUTS, sums_stride); });
}

// The product of at most TILE_TOKENS tokens and a panel.
template <bool ADDS, bool PREFETCHES>
void add_few(const bf16* x, int64_t x_stride, const bf16* rows, int64_t steps, float* sums) {
  add_row_of_tiles<ADDS, PANEL_TILES, PREFETCHES ? FEW_AHEAD_BYTES : 0>(x, x_stride, rows, PANEL_ROW_BYTES, steps, sums,
                                                                        SUMS_STRIDE);
}

// As add_few for more than TILE_TOKENS tokens, up to GROUP_TOKENS, and PAIR_TILES tiles of outputs.
template <bool ADDS>
void add_pair(const bf16* x, int64_t x_stride, const bf16* rows, int64_t steps, float* sums, AheadOfTiles& ahead) {
  constexpr bool IS_WIDE = PAIR_TILES == 2;
  float* lower = sums + TILE_TOKENS * PANEL_LEN;
  if constexpr (ADDS) {
    load_tile<0>(sums, SUMS_STRIDE);
    load_tile<2>(lower, SUMS_STRIDE);
    if constexpr (IS_WIDE) load_tile<1>(sums + TILE_OUTPUTS, SUMS_STRIDE), load_tile<3>(lower + TILE_OUTPUTS, SUMS_STRIDE);
  } else {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  }
  const int64_t token_bytes = x_stride * sizeof(bf16);
  const char* weight = (const char*)rows;
  for (int64_t step = 0; step < steps; step++, x += TILE_INPUTS, weight += TILE_INPUTS / 2 * PANEL_ROW_BYTES) {
    ahead.prefetch();
    load_tile<6>(weight, PANEL_ROW_BYTES);
    load_tile<4>(x, token_bytes);
    multiply_tiles<0, 4, 6>();
    if constexpr (IS_WIDE) {
      load_tile<7>(weight + 64, PANEL_ROW_BYTES);
      multiply_tiles<1, 4, 7>();
    }
    load_tile<5>(x + TILE_TOKENS * x_stride, token_bytes);
    multiply_tiles<2, 5, 6>();
    if constexpr (IS_WIDE) multiply_tiles<3, 5, 7>();
  }
  store_tile<0>(sums, SUMS_STRIDE);
  store_tile<2>(lower, SUMS_STRIDE);
  if constexpr (IS_WIDE) store_tile<1>(sums + TILE_OUTPUTS, SUMS_STRIDE), store_tile<3>(lower + TILE_OUTPUTS, SUMS_STRIDE);
}

// The same for the tokens of one group and all outputs of a panel.
template <bool ADDS>
void add_group(const bf16* x, int64_t x_stride, int64_t num_tokens, const bf16* rows, int64_t steps, float* sums, bool is_read_once,
               AheadOfTiles& ahead) {
  if (num_tokens <= TILE_TOKENS) return (is_read_once ? add_few<ADDS, true> : add_few<ADDS, false>)(x, x_stride, rows, steps, sums);
  for (int i = 0; i < PANEL_TILES; i += PAIR_TILES)
    add_pair<ADDS>(x, x_stride, rows + i * TILE_OUTPUTS * 2, steps, sums + i * TILE_OUTPUTS, ahead);
}

// Adds the products of num_tokens tokens and num_inputs inputs of a panel to sums [tokens, PANEL_LEN], or replaces the
// sums. The ahead_bytes at `ahead` are read next.
template <bool ADDS>
void add_tokens(TileRegisters& registers, const bf16* x, int64_t x_stride, int64_t num_tokens, const bf16* rows, int64_t num_inputs,
                float* sums, bool is_read_once, const char* ahead, int64_t ahead_bytes) {
  const int64_t steps = num_inputs / TILE_INPUTS, rest = num_inputs % TILE_INPUTS;
  const int64_t num_groups = (num_tokens + GROUP_TOKENS - 1) / GROUP_TOKENS;
  const int64_t passes = std::max<int64_t>(1, num_groups * (PANEL_TILES / PAIR_TILES) * steps);
  AheadOfTiles own{ahead, ahead + ahead_bytes, (ahead_bytes / passes + 63) / 64 * 64}, none;
  for (int64_t t = 0; t < num_tokens && steps; t += GROUP_TOKENS) {
    const int64_t count = std::min(GROUP_TOKENS, num_tokens - t);
    registers.resize(count, TILE_INPUTS);
    add_group<ADDS>(x + t * x_stride, x_stride, count, rows, steps, sums + t * PANEL_LEN, is_read_once, own);
  }
  for (int64_t t = 0; t < num_tokens && rest; t += GROUP_TOKENS) {
    const int64_t count = std::min(GROUP_TOKENS, num_tokens - t);
    registers.resize(count, rest);
    (ADDS || steps ? add_group<true> : add_group<false>)(x + t * x_stride + steps * TILE_INPUTS, x_stride, count,
                                                         rows + steps * TILE_INPUTS * PANEL_LEN, 1, sums + t * PANEL_LEN,
                                                         false, none);
  }
}

#endif
