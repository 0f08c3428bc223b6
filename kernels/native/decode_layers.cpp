// The layers of a decoder over tokens of a sequence each, in one call.
//
// A step of one token through a small model is 80 ops of 2 to 150 us, and from Python each takes 15 more. Here one
// follows the other. They are the ops that Python would call, so the numbers are the same bit for bit.
#include <algorithm>

#include "ops.h"

namespace {

constexpr int64_t FP8_CACHE = 3;

// What quire_linear takes of a weight.
struct Linear {
  const void* panels;
  const float* scales;
  const void* bias;
  int64_t stored, in_features, out_features, stride;
};

// The fields are those of _Layer in kernels/decode_layers.py, in its order.
struct Layer {
  Linear qkv, output, gate_up, down;
  const void *before_attention, *before_mlp;  // norms, [E]
  const void *after_attention, *after_mlp;    // [E], or null
  const void *q_norm, *k_norm;                // [D], or null
  void* cache;                                // [N, 2, Hkv, B, D]
  float* cache_scales;                        // [N, 2, Hkv, B], or null
  int64_t cache_type;                         // as for quire_paged_decode
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  int64_t rope;                               // which of the step's rotations, or less than 0
  int64_t gate;
  float scale, soft_cap, eps, residual_scale;
  float cache_limit, cache_min_magnitude;
};

// Cosines and sines of a step's tokens, [T, R] each with a stride between tokens.
struct Rotation {
  const void *cos, *sin;
  int64_t rotated_dim, stride;
};

struct Step {
  int is_bf16;
  int64_t num_tokens;
  const Rotation* rotations;
  const int64_t* slots;   // [T]
  const int32_t* tables;  // [T, M]
  int64_t table_stride;
  const int32_t* lens;  // [T]
  int threads;

  int64_t width() const { return is_bf16 ? 2 : 4; }
};

// Memory for what the ops of half a layer hand to each other.
struct Scratch {
  char* next;

  char* take(int64_t numbers, const Step& step) {
    char* taken = next;
    next += numbers * step.width();
    return taken;
  }
};

void multiply(const Linear& weight, const void* x, void* y, const Step& step) {
  quire_linear(int(weight.stored), step.is_bf16, x, weight.panels, weight.scales, weight.bias, y, step.num_tokens,
               weight.in_features, weight.out_features, weight.stride, step.threads);
}

// Of `num_heads` heads of each token, in place.
void normalise_heads(char* heads, const void* weight, int64_t num_heads, const Layer& layer, const Step& step) {
  const int64_t stride = layer.qkv.out_features;
  quire_rms_norm(step.is_bf16, heads, weight, heads, step.num_tokens, num_heads, stride, layer.head_dim, stride,
                 layer.head_dim, layer.eps, step.threads);
}

void store(const char* kv, const Layer& layer, const Step& step) {
  const int64_t stride = layer.qkv.out_features, num_pieces = 2 * layer.num_kv_heads;
  if (layer.cache_scales)
    quire_write_kv_quantized(step.is_bf16, layer.cache_type == FP8_CACHE, kv, layer.cache, layer.cache_scales, step.slots,
                             step.num_tokens, stride, num_pieces, layer.block_size, layer.head_dim,
                             layer.cache_limit, layer.cache_min_magnitude);
  else
    quire_write_kv(step.width(), kv, layer.cache, step.slots, step.num_tokens, stride, num_pieces, layer.block_size,
                   layer.head_dim);
}

// What a half has computed, in place: what is to be added to the residual.
void finish(void* x, const void* norm, const Layer& layer, const Step& step) {
  const int64_t length = layer.qkv.in_features;
  if (norm)
    quire_rms_norm(step.is_bf16, x, norm, x, 1, step.num_tokens, 0, length, 0, length, layer.eps, step.threads);
  if (layer.residual_scale != 1.f)
    quire_scale(step.is_bf16, x, layer.residual_scale, step.num_tokens, length, step.threads);
}

// x, or nothing if that is null, to the residual, and that normalised to `out`, which may be x.
void add_and_normalise(const void* x, void* residual, const void* norm, void* out, const Layer& layer,
                       const Step& step) {
  const int64_t length = layer.qkv.in_features;
  if (x)
    quire_add_rms_norm(step.is_bf16, x, residual, norm, out, step.num_tokens, length, layer.eps, step.threads);
  else
    quire_rms_norm(step.is_bf16, residual, norm, out, 1, step.num_tokens, 0, length, 0, length, layer.eps,
                   step.threads);
}

// [T, E] to [T, E].
void attend(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch) {
  const int64_t stride = layer.qkv.out_features, head_width = layer.head_dim * step.width();
  char* queries = scratch.take(step.num_tokens * stride, step);
  char* keys = queries + layer.num_heads * head_width;
  char* attended = scratch.take(step.num_tokens * layer.output.in_features, step);
  multiply(layer.qkv, normed, queries, step);
  if (layer.q_norm) {
    normalise_heads(queries, layer.q_norm, layer.num_heads, layer, step);
    normalise_heads(keys, layer.k_norm, layer.num_kv_heads, layer, step);
  }
  if (layer.rope >= 0) {
    const Rotation& rotation = step.rotations[layer.rope];
    quire_apply_rope(step.is_bf16, queries, rotation.cos, rotation.sin, step.num_tokens,
                     layer.num_heads + layer.num_kv_heads, layer.head_dim, rotation.rotated_dim, stride,
                     rotation.stride, step.threads);
  }
  store(keys, layer, step);
  quire_paged_decode(step.is_bf16, int(layer.cache_type), queries, layer.cache, layer.cache_scales, step.tables,
                     step.lens, attended, step.num_tokens, layer.num_heads, layer.num_kv_heads, layer.head_dim,
                     layer.block_size, step.table_stride, stride, layer.scale, layer.window, layer.soft_cap, nullptr,
                     step.threads);
  multiply(layer.output, attended, out, step);
}

// [T, E] to [T, E].
void feed_forward(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch) {
  char* gate_up = scratch.take(step.num_tokens * layer.gate_up.out_features, step);
  char* gated = scratch.take(step.num_tokens * layer.down.in_features, step);
  multiply(layer.gate_up, normed, gate_up, step);
  quire_gate_and_mul(step.is_bf16, int(layer.gate), gate_up, gated, step.num_tokens, layer.down.in_features,
                     step.threads);
  multiply(layer.down, gated, out, step);
}

}  // namespace

extern "C" {

int64_t quire_decode_layer_bytes() { return sizeof(Layer); }

// Halves begin to end of the layers, where half 2 i is the attention of layer i and half 2 i + 1 its feed-forward
// network. Each takes x [T, E], which the half before has left, finishes it and adds it to the residual [T, E], and
// leaves in x what it computes itself. Half 0 takes none. What would be the half after the last leaves the residual
// normalised.
void quire_decode_layers(const Layer* layers, int64_t num_layers, const void* last_norm, int64_t begin, int64_t end,
                         int is_bf16, int64_t num_tokens, const Rotation* rotations, const int64_t* slots,
                         const int32_t* tables, int64_t table_stride, const int32_t* lens, void* x, void* residual,
                         void* scratch, int threads) {
  const Step step{is_bf16, num_tokens, rotations, slots, tables, table_stride, lens, threads};
  for (int64_t half = begin; half < end; half++) {
    const bool attends = half % 2 == 0;
    const Layer& finished = layers[std::max<int64_t>(half - 1, 0) / 2];  // of the half before
    if (half > 0) finish(x, attends ? finished.after_mlp : finished.after_attention, finished, step);
    if (half == 2 * num_layers) {
      add_and_normalise(x, residual, last_norm, x, finished, step);
      continue;
    }
    const Layer& layer = layers[half / 2];
    const void* norm = attends ? layer.before_attention : layer.before_mlp;
    Scratch free{(char*)scratch};
    char* normed = free.take(num_tokens * layer.qkv.in_features, step);
    add_and_normalise(half > 0 ? x : nullptr, residual, norm, normed, layer, step);
    (attends ? attend : feed_forward)(layer, step, normed, x, free);
  }
}
}
