// Elementwise ops between matmuls. With one token per step an op costs less than its call, so each op is one call.
#include "activation.h"
#include "constants.h"
#include "ops.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

// Below this many elements, synchronizing threads costs more than they save.
constexpr int64_t MIN_PARALLEL = 16384;

// Calls body(row) for rows of `length` elements.
template <typename Body>
void for_rows(int64_t rows, int64_t length, int threads, const Body& body) {
  if (rows * length < MIN_PARALLEL) threads = 1;
  const int64_t run = std::max<int64_t>(1, rows / (4 * threads));
  parallel_for((rows + run - 1) / run, threads, [&](auto& next) {
    for (int64_t row; (row = next() * run) < rows;)
      for (const int64_t end = std::min(row + run, rows); row < end; row++) body(row);
  });
}

template <typename T>
void normalize(const T* x, const T* weight, T* out, int64_t length, float eps) {
  Vec squares = {};
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  const float scale = 1.f / std::sqrt(sum_of(squares) / length + eps);
  for (i = 0; i < length; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t num_outer, int64_t num_inner, int64_t outer_stride,
              int64_t inner_stride, int64_t out_stride, int64_t length, float eps, int threads) {
  for_rows(num_outer * num_inner, length, threads, [&](int64_t row) {
    const int64_t outer = row / num_inner, inner = row % num_inner;
    normalize(x + outer * outer_stride + inner * inner_stride, weight, out + outer * out_stride + inner * length,
              length, eps);
  });
}

template <typename T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t length, float eps,
                  int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    const int64_t begin = row * length;
    for (int64_t i = begin; i < begin + length; i += LANES) store(residual + i, load(residual + i) + load(x + i));
    normalize(residual + begin, weight, out + begin, length, eps);
  });
}

template <typename T>
void scale(T* x, float factor, int64_t rows, int64_t length, int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    for (int64_t i = row * length; i < (row + 1) * length; i += LANES) store(x + i, load(x + i) * factor);
  });
}

template <Gate GATE, typename T>
void gate_and_mul(const T* gate_up, T* out, int64_t rows, int64_t length, int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    gate_row(gate_up + row * 2 * length, out + row * length, length,
             [](Vec gate, Vec up) { return activate<GATE>(gate) * up; });
  });
}

template <typename T>
void apply_rope(T* x, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t head_dim,
                int64_t rotated_dim, int64_t token_stride, int64_t table_stride, int threads) {
  const int64_t half = rotated_dim / 2;
  for_rows(tokens, heads * head_dim, threads, [&](int64_t t) {
    const T *c = cos + t * table_stride, *s = sin + t * table_stride;
    for (int64_t h = 0; h < heads; h++) {
      T* head = x + t * token_stride + h * head_dim;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES) {
        const Vec a = load(head + i), b = load(head + half + i);
        store(head + i, a * load(c + i) + b * load(s + i));
        store(head + half + i, b * load(c + half + i) + a * load(s + half + i));
      }
      for (; i < half; i++) {
        const float a = to_float(head[i]), b = to_float(head[half + i]);
        store_one(head + i, a * to_float(c[i]) + b * to_float(s[i]));
        store_one(head + half + i, b * to_float(c[half + i]) + a * to_float(s[half + i]));
      }
    }
  });
}

}  // namespace

// All lengths are multiples of LANES, but for those of activations.
extern "C" {

// x [num_outer, num_inner, length] may have any outer and inner strides. out may be x; its rows of one `outer` are
// adjacent.
void quire_rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t num_outer, int64_t num_inner,
                    int64_t outer_stride, int64_t inner_stride, int64_t out_stride, int64_t length, float eps,
                    int threads) {
  FOR_DTYPE(rms_norm((const T*)x, (const T*)weight, (T*)out, num_outer, num_inner, outer_stride, inner_stride,
                    out_stride, length, eps, threads));
}

void quire_add_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int64_t rows,
                        int64_t length, float eps, int threads) {
  FOR_DTYPE(add_rms_norm((const T*)x, (T*)residual, (const T*)weight, (T*)out, rows, length, eps, threads));
}

void quire_scale(int dtype, void* x, float factor, int64_t rows, int64_t length, int threads) {
  FOR_DTYPE(scale((T*)x, factor, rows, length, threads));
}

void quire_gate_and_mul(int dtype, int gate, const void* gate_up, void* out, int64_t rows, int64_t length,
                        int threads) {
  if (gate == GELU_TANH)
    FOR_DTYPE((gate_and_mul<GELU_TANH>((const T*)gate_up, (T*)out, rows, length, threads)));
  else
    FOR_DTYPE((gate_and_mul<SILU>((const T*)gate_up, (T*)out, rows, length, threads)));
}

void quire_clamped_gate_and_mul(int dtype, float alpha, float limit, float offset, const void* gate_up, void* out,
                                int64_t rows, int64_t length, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    for_rows(rows, length, threads, [&](int64_t row) {
      gate_row((const T*)gate_up + row * 2 * length, (T*)out + row * length, length, Clamped{alpha, limit, offset});
    });
  });
}

// out [count] = the activation of x [count].
void quire_activate(int dtype, int activation, const void* x, void* out, int64_t count, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t num_runs = (count + MIN_PARALLEL - 1) / MIN_PARALLEL;
    parallel_for(num_runs, threads, [&](auto& next) {
      for (int64_t run; (run = next()) < num_runs;) {
        const int64_t begin = run * MIN_PARALLEL, size = std::min(MIN_PARALLEL, count - begin);
        const T* from = (const T*)x + begin;
        T* to = (T*)out + begin;
        if (activation == GELU_TANH)
          map_row(from, to, size, activate<GELU_TANH>);
        else if (activation == SIGMOID)
          map_row(from, to, size, activate<SIGMOID>);
        else if (activation == TANH)
          map_row(from, to, size, activate<TANH>);
        else
          map_row(from, to, size, activate<SILU>);
      }
    });
  });
}

void quire_apply_rope(int dtype, void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads,
                      int64_t head_dim, int64_t rotated_dim, int64_t token_stride, int64_t table_stride, int threads) {
  FOR_DTYPE(apply_rope((T*)x, (const T*)cos, (const T*)sin, tokens, heads, head_dim, rotated_dim, token_stride,
                      table_stride, threads));
}

// Writes kv [T, 2, Hkv, D] to its slots of a cache [N, 2, Hkv, B, D]. num_pieces is 2 Hkv.
void quire_write_kv(int64_t element_bytes, const void* kv, void* cache, const int64_t* slots, int64_t tokens,
                    int64_t token_stride, int64_t num_pieces, int64_t block_size, int64_t head_dim) {
  const int64_t piece_bytes = head_dim * element_bytes;
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t slot = slots[t] < 0 ? 0 : slots[t];
    const char* from = (const char*)kv + t * token_stride * element_bytes;
    char* to = (char*)cache + (slot / block_size * num_pieces * block_size + slot % block_size) * piece_bytes;
    for (int64_t p = 0; p < num_pieces; p++)
      memcpy(to + p * block_size * piece_bytes, from + p * piece_bytes, piece_bytes);
  }
}
}
