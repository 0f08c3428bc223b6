// What the attention ops share: the sizes of their tiles, rows read as float32, and buffers of a thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "constants.h"
#include "simd.h"

// Keys of a tile.
constexpr int KEY_TILE = 64;
// Rows and vectors of columns whose products stay in registers.
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = NUM_REGISTERS == 32 ? 4 : 2;

// Queries and outputs have a dtype known at run time only: they are few compared to the keys.
inline Vec load_as(int dtype, const void* numbers, int64_t i) {
  return with_dtype(dtype, [&](auto t) { return load((const decltype(t)*)numbers + i); });
}

inline void store_as(int dtype, void* numbers, int64_t i, Vec v) {
  with_dtype(dtype, [&](auto t) { store((decltype(t)*)numbers + i, v); });
}

// Converts the first `length` numbers of n rows, which are `stride` apart, to float32 and multiplies each row by its
// scale, if there are scales.
template <typename T>
void widen(const T* rows, int64_t stride, const float* scales, int64_t n, int64_t length, float* out) {
  for (int64_t i = 0; i < n; i++) {
    const float scale = scales ? scales[i] : 1.f;
    for (int64_t d = 0; d < length; d += LANES) store(out + i * length + d, load(rows + i * stride + d) * scale);
  }
}

// Transposes n rows of `length` numbers to columns; rows of the result are KEY_TILE apart.
inline void transpose_rows(const float* rows, int64_t n, int64_t length, float* columns) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int64_t d = 0; d < length; d += LANES) {
      Vec square[LANES];
      for (int r = 0; r < LANES; r++) square[r] = load(rows + (i + r) * length + d);
      transpose(square);
      for (int c = 0; c < LANES; c++) store(columns + (d + c) * KEY_TILE + i, square[c]);
    }
  for (; i < n; i++)
    for (int64_t d = 0; d < length; d++) columns[d * KEY_TILE + i] = rows[i * length + d];
}

// Zeros that begin at a cache line: a vector that crosses two lines takes two loads.
class Floats {
 public:
  explicit Floats(int64_t count) : lines_((count + LINE_LEN - 1) / LINE_LEN), count_(count) {}

  float* data() { return lines_.data()->numbers; }
  float& operator[](int64_t i) { return data()[i]; }
  void fill(float value) { std::fill(data(), data() + count_, value); }

 private:
  static constexpr int64_t LINE_LEN = 16;
  struct alignas(64) Line {
    float numbers[LINE_LEN];
  };

  std::vector<Line> lines_;
  int64_t count_;
};

struct Softmax {
  float max = -INFINITY, sum = 0;
};
