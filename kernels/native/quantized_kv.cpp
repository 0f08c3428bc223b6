// Writes to a quantized cache: one byte per number, and a scale per token, key or value, and head.
#include "constants.h"
#include "ops.h"
#include "simd.h"

namespace {

// limit and min_magnitude are those of kernels/quantized_kv.py.
template <typename T, typename Stored>
void write(const T* kv, Stored* cache, float* scales, const int64_t* slots, int64_t tokens, int64_t token_stride,
           int64_t num_pieces, int64_t block_size, int64_t head_dim, float limit, float min_magnitude) {
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t slot = slots[t] < 0 ? 0 : slots[t];
    for (int64_t p = 0; p < num_pieces; p++) {
      const T* from = kv + t * token_stride + p * head_dim;
      const int64_t row = (slot / block_size * num_pieces + p) * block_size + slot % block_size;
      Vec top = broadcast(min_magnitude);
      for (int64_t d = 0; d < head_dim; d += LANES) {
        const Vec v = load(from + d);
        top = larger(top, larger(v, -v));
      }
      const float scale = max_of(top) / limit;
      scales[row] = scale;
      for (int64_t d = 0; d < head_dim; d += LANES) {
        const Vec ratio = load(from + d) / scale;
        const Vec below = ratio < limit ? ratio : broadcast(limit);
        store(cache + row * head_dim + d, larger(below, broadcast(-limit)));
      }
    }
  }
}

}  // namespace

// Writes kv [T, 2, Hkv, D] to its slots of a cache [N, 2, Hkv, B, D] and of its scales [N, 2, Hkv, B]. num_pieces is
// 2 Hkv; cache_dtype is int8 or float8_e4m3fn.
extern "C" void quire_write_kv_quantized(int dtype, int cache_dtype, const void* kv, void* cache, float* scales,
                                         const int64_t* slots, int64_t tokens, int64_t token_stride,
                                         int64_t num_pieces, int64_t block_size, int64_t head_dim, float limit,
                                         float min_magnitude) {
  with_dtype(dtype, [&](auto t) {
    const auto write_as = [&](auto* stored) {
      write((const decltype(t)*)kv, stored, scales, slots, tokens, token_stride, num_pieces, block_size, head_dim, limit,
            min_magnitude);
    };
    if (cache_dtype == FLOAT8_E4M3FN)
      write_as((fp8*)cache);
    else
      write_as((int8_t*)cache);
  });
}
