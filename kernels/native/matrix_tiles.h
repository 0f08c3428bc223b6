// Registers that hold tiles of matrices (Intel AMX), as few operations as the products of bfloat16 need. Where the
// compiler's target lacks them, and QUIRE_EMULATES_TILES is set, plain C++ computes the same bit for bit, so that
// all code above this file is tested on any machine. The process has asked Linux for the registers before it loads a
// library that is built for them (instruction_sets.py).
//
// A product adds 32 inputs at a time to each sum: the even and the odd inputs are added up from 0 on, one product after
// the other, then both, and the result to the sum. Denormal numbers count as 0. Products of the same inputs in vector
// registers (dpbf16ps) add in another order, so one output is never computed partly in the one and partly in the other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AMX_BF16__) || defined(QUIRE_EMULATES_TILES)
#define QUIRE_HAS_TILES 1
#endif

#if defined(QUIRE_HAS_TILES)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

// Sums have TILE_TOKENS rows of TILE_OUTPUTS numbers.
constexpr int TILE_TOKENS = 16, TILE_OUTPUTS = 16;
// Inputs of one product. Two inputs of an output are adjacent, as in a row of a panel (packed_weights.h).
constexpr int TILE_INPUTS = 32;
constexpr int NUM_TILES = 8;

#if defined(QUIRE_HAS_TILES)

// The sizes of all tiles, as the processor reads them.
struct alignas(64) TileSizes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_bytes);
  }
};

#if defined(__AMX_BF16__)

// The compilers' own functions do not tell the optimizer what memory a tile reads (GCC 12), so each is written out here.
inline void set_tile_sizes(const TileSizes& sizes) { asm volatile("ldtilecfg %0" : : "m"(sizes) : "memory"); }

// Afterwards a switch to another thread saves no tiles.
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// Rows are `stride` bytes apart.
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

// sums += x [tokens, inputs] times w [inputs / 2, outputs, 2].
template <int SUMS, int X, int W>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}

#else

struct EmulatedTiles {
  TileSizes sizes;
  char bytes[NUM_TILES][TILE_TOKENS][64];
};

inline EmulatedTiles& emulated_tiles() {
  thread_local EmulatedTiles tiles;
  return tiles;
}

inline void set_tile_sizes(const TileSizes& sizes) {
  emulated_tiles().sizes = sizes;
  memset(emulated_tiles().bytes, 0, sizeof emulated_tiles().bytes);
}

// A product without sizes then stops the program, as it does on the processor.
inline void release_tiles() { emulated_tiles().sizes.palette = 0; }

template <int T>
inline void clear_tile() {
  memset(emulated_tiles().bytes[T], 0, sizeof emulated_tiles().bytes[T]);
}

template <int T>
inline void load_tile(const void* from, int64_t stride) {
  EmulatedTiles& tiles = emulated_tiles();
  if (!tiles.sizes.palette) __builtin_trap();
  clear_tile<T>();
  for (int row = 0; row < tiles.sizes.rows[T]; row++)
    memcpy(tiles.bytes[T][row], (const char*)from + row * stride, tiles.sizes.row_bytes[T]);
}

template <int T>
inline void store_tile(void* to, int64_t stride) {
  EmulatedTiles& tiles = emulated_tiles();
  if (!tiles.sizes.palette) __builtin_trap();
  for (int row = 0; row < tiles.sizes.rows[T]; row++)
    memcpy((char*)to + row * stride, tiles.bytes[T][row], tiles.sizes.row_bytes[T]);
}

inline float without_denormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

template <int SUMS, int X, int W>
inline void multiply_tiles() {
  EmulatedTiles& tiles = emulated_tiles();
  const TileSizes& sizes = tiles.sizes;
  if (!sizes.palette || sizes.rows[SUMS] != sizes.rows[X] || sizes.row_bytes[SUMS] != sizes.row_bytes[W] ||
      sizes.row_bytes[X] != 4 * sizes.rows[W])
    __builtin_trap();
  const auto number = [&](int tile, int row, int i) {
    bf16 b;
    memcpy(&b, tiles.bytes[tile][row] + i * sizeof b, sizeof b);
    return without_denormal(to_float(b));
  };
  for (int m = 0; m < sizes.rows[SUMS]; m++)
    for (int n = 0; n < sizes.row_bytes[SUMS] / 4; n++) {
      float halves[2] = {};
      for (int k = 0; k < sizes.rows[W]; k++)
        for (int i = 0; i < 2; i++)
          halves[i] = without_denormal(std::fma(number(X, m, 2 * k + i), number(W, k, 2 * n + i), halves[i]));
      float sum;
      memcpy(&sum, tiles.bytes[SUMS][m] + n * sizeof sum, sizeof sum);
      sum = without_denormal(without_denormal(sum) + without_denormal(halves[0] + halves[1]));
      memcpy(tiles.bytes[SUMS][m] + n * sizeof sum, &sum, sizeof sum);
    }
}

#endif
#endif
