// Tiles of queries and keys: products that stay in registers, and the online softmax of their rows (Milakov and
// Gimelshein, 2018).
#pragma once

#include "tile_buffers.h"

// As `widen`, for rows of a dtype known at run time; `row` is the index of the first.
inline void widen_as(int dtype, const void* data, int64_t row, int64_t stride, const float* scales, int64_t n,
                     int64_t length, float* out) {
  const float* own_scales = scales ? scales + row : nullptr;
  const int64_t from = row * stride;
  switch (dtype) {
    case FLOAT32: return widen((const float*)data + from, stride, own_scales, n, length, out);
    case BFLOAT16: return widen((const bf16*)data + from, stride, own_scales, n, length, out);
    case FLOAT16: return widen((const f16*)data + from, stride, own_scales, n, length, out);
    case INT8: return widen((const int8_t*)data + from, stride, own_scales, n, length, out);
    case FLOAT8_E4M3FN: return widen((const fp8*)data + from, stride, own_scales, n, length, out);
  }
}

// Rows of a paged cache with one row per token, as latents and the keys of an indexer have; `dim` numbers of each are
// read.
struct PagedRows {
  int dtype;
  const void* data;
  const float* scales;  // of a quantized cache: one per row
  int64_t stride, dim, block_size;

  // Copies the rows of `count` positions of a sequence to `out` as float32, [count, dim].
  void read(const int32_t* table, int64_t position, int64_t count, float* out) const {
    for (int64_t t = 0; t < count;) {
      const int64_t offset = (position + t) % block_size, n = std::min(block_size - offset, count - t);
      const int64_t row = table[(position + t) / block_size] * block_size + offset;
      widen_as(dtype, data, row, stride, scales, n, dim, out + t * dim);
      t += n;
    }
  }
};

// Numbers of rows that are padded for tile products, and of columns for vectors.
inline int64_t padded_rows(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }
inline int64_t padded_columns(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

// c [TILE_ROWS, V LANES] = a [TILE_ROWS, depth] times b [depth, V LANES]; += with `add`.
template <int V>
void tile_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                  int64_t depth, bool add) {
  Vec acc[TILE_ROWS][V] = {};
  if (add)
    for (int r = 0; r < TILE_ROWS; r++)
      for (int v = 0; v < V; v++) acc[r][v] = load(c + r * c_stride + v * LANES);
  for (int64_t k = 0; k < depth; k++) {
    Vec row[V];
    for (int v = 0; v < V; v++) row[v] = load(b + k * b_stride + v * LANES);
    for (int r = 0; r < TILE_ROWS; r++)
      for (int v = 0; v < V; v++) acc[r][v] = multiply_add(a[r * a_stride + k], row[v], acc[r][v]);
  }
  for (int r = 0; r < TILE_ROWS; r++)
    for (int v = 0; v < V; v++) store(c + r * c_stride + v * LANES, acc[r][v]);
}

// c [rows, columns] = a [rows, depth] times b [depth, columns]; += with `add`. rows is a multiple of TILE_ROWS.
inline void matmul(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                   int64_t rows, int64_t depth, int64_t columns, bool add) {
  constexpr int64_t WIDE = TILE_VECTORS * LANES;
  for (int64_t r = 0; r < rows; r += TILE_ROWS) {
    const float* from = a + r * a_stride;
    float* to = c + r * c_stride;
    int64_t j = 0;
    for (; j + WIDE <= columns; j += WIDE)
      tile_product<TILE_VECTORS>(from, a_stride, b + j, b_stride, to + j, c_stride, depth, add);
    for (; j < columns; j += LANES) tile_product<1>(from, a_stride, b + j, b_stride, to + j, c_stride, depth, add);
  }
}

// One thread's buffers for the attention of a tile of queries. The softmax reads whole groups of LANES rows.
struct Tile {
  int64_t rows, key_dim, value_dim;
  Floats queries;       // [rows, key_dim]
  Floats keys;          // [key_dim, KEY_TILE]
  Floats scores;        // [rows, KEY_TILE]; then the softmax weights
  Floats acc;           // [rows, value_dim]
  Floats maxima, sums;  // of each row's softmax

  Tile(int64_t num_rows, int64_t key_len, int64_t value_len)
      : rows(padded_rows(num_rows)),
        key_dim(key_len),
        value_dim(value_len),
        queries(rows * key_dim),
        keys(key_dim * KEY_TILE),
        scores((rows + LANES) * KEY_TILE),
        acc(rows * value_dim),
        maxima(rows + LANES),
        sums(rows + LANES) {}

  // Begins with states(row) of the softmax.
  template <typename States>
  void reset(const States& states) {
    acc.fill(0.f);
    for (int64_t row = 0; row < rows; row++) {
      const Softmax state = states(row);
      maxima[row] = state.max, sums[row] = state.sum;
    }
  }

  // Computes the scores of `count` keys for num_rows rows, a multiple of TILE_ROWS.
  void score(int64_t num_rows, int64_t count) {
    matmul(queries.data(), key_dim, keys.data(), KEY_TILE, scores.data(), KEY_TILE, num_rows, key_dim,
           padded_columns(count), false);
  }

  // Adds `count` weighted values, which are `stride` apart.
  void add_values(const float* values, int64_t stride, int64_t num_rows, int64_t count) {
    matmul(scores.data(), KEY_TILE, values, stride, acc.data(), value_dim, num_rows, count, value_dim, true);
  }

  // Replaces the scores of up to LANES rows from `first` on by softmax weights. Row first + r attends to the first
  // visible[r] of `count` keys. The rows are folded together, since each reduction of one row waits for itself.
  void softmax(int64_t first, int64_t num_rows, int64_t count, const IntVec& visible, bool is_masked) {
    const int num_vectors = int((count + LANES - 1) / LANES);
    const auto vector_of = [&](int r, int i) { return &scores[(first + r) * KEY_TILE + i * LANES]; };
    Vec tops[LANES];
    for (int r = 0; r < LANES; r++) {
      tops[r] = broadcast(-INFINITY);
      for (int i = 0; i < num_vectors; i++) {
        Vec s = load(vector_of(r, i));
        if (is_masked) {
          s = lane_indices() + i * LANES < visible[r] ? s : broadcast(-INFINITY);
          store(vector_of(r, i), s);
        }
        tops[r] = larger(s, tops[r]);
      }
    }
    const Vec before = load(&maxima[first]), now = larger(maxima_of(tops), before);
    // Rows without any key so far have no maximum; their weights are 0.
    const Vec shift = now == -INFINITY ? Vec{} : now, decay = exp_of(before - shift);
    Vec weight_sums[LANES];
    for (int r = 0; r < LANES; r++) {
      weight_sums[r] = Vec{};
      for (int i = 0; i < num_vectors; i++) {
        const Vec weights = exp_of(load(vector_of(r, i)) - shift[r]);
        store(vector_of(r, i), weights);
        weight_sums[r] += weights;
      }
    }
    store(&maxima[first], now);
    store(&sums[first], load(&sums[first]) * decay + sums_of(weight_sums));
    for (int r = 0; r < num_rows; r++) {
      if (decay[r] == 1.f) continue;
      float* row = &acc[(first + r) * value_dim];
      for (int64_t d = 0; d < value_dim; d += LANES) store(row + d, load(row + d) * decay[r]);
    }
  }
};
