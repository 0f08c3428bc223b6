// The layers of a decoder over one token per sequence (decode_layers.cpp), for ops that are built of them.
#pragma once

#include "constants.h"
#include "lora.h"
#include "ops.h"

// The arguments of quire_linear that describe a weight, and the adapters of the layer or null.
struct Linear {
  const void* matrix;
  const float* scales;
  const void* bias;
  const LoraFactors* lora;
  int64_t dtype, in_features, out_features, stride;
};

// Python fills this struct: kernels/native/decode_layers.py declares the same fields in the same order.
struct Layer {
  Linear qkv, output, gate_up, down;
  const void *before_attention, *before_mlp;  // weights of RMSNorm, [E]
  const void *after_attention, *after_mlp;    // [E], or null
  const void *q_norm, *k_norm;                // [D], or null
  void* cache;                                // [N, 2, Hkv, B, D]
  float* cache_scales;                        // [N, 2, Hkv, B], or null
  int64_t cache_dtype;
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  int64_t rope;                               // index into the step's rotations; negative: none
  int64_t gate;
  float scale, soft_cap, eps, residual_scale;
  float cache_limit, cache_min_magnitude;
};

// Cosines and sines of a step's tokens, each [T, R] with `stride` elements between tokens.
struct Rotation {
  const void *cos, *sin;
  int64_t rotated_dim, stride;
};

struct Step {
  int dtype;
  int64_t num_tokens;
  const Rotation* rotations;
  const int64_t* slots;   // [T]
  const int32_t* tables;  // [T, M]
  int64_t table_stride;
  const int32_t* lens;  // [T]
  int threads;
  const LoraGroups* lora;  // the tokens with adapters; null: none
};

// Bump allocator for intermediate results.
struct Scratch {
  char* next;

  char* allocate(int64_t count, int dtype) {
    char* allocated = next;
    next += count * itemsize(dtype);
    return allocated;
  }
};

void multiply(const Linear& weight, const void* x, void* y, const Step& step);

// Attention sublayer: normed [T, inputs of qkv] -> out [T, E].
void attend(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch);

// Feed-forward sublayer: normed [T, E] -> out [T, E].
void feed_forward(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch);

// Normalizes and scales, in place, the output [T, E] of a sublayer, which is added to the residual next. `norm` may be
// null.
void finish(void* x, const void* norm, const Layer& layer, const Step& step);

extern "C" {

void quire_decode_layers(const Layer* layers, int64_t num_layers, const void* last_norm, int64_t begin, int64_t end,
                         int dtype, int64_t num_tokens, const Rotation* rotations, const int64_t* slots,
                         const int32_t* tables, int64_t table_stride, const int32_t* lens, void* x, void* residual,
                         void* aux, const int64_t* aux_columns, int64_t aux_stride, void* scratch, int threads,
                         const LoraGroups* lora);
}
