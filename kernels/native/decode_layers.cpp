// The layers of a decoder over one token per sequence, in one call.
//
// One token through a small model takes 80 ops of 2 to 150 us each, and a call from Python adds 15 us to each. The ops
// here are the ones that Python would call, so the results are the same bit for bit.
#include "decode_layers.h"
#include "packed_weights.h"

#include <algorithm>
#include <cstring>

namespace {

// Normalizes `num_heads` heads of each token in place.
void normalize_heads(char* heads, const void* weight, int64_t num_heads, const Layer& layer, const Step& step) {
  const int64_t stride = layer.qkv.out_features;
  quire_rms_norm(step.dtype, heads, weight, heads, step.num_tokens, num_heads, stride, layer.head_dim, stride,
                 layer.head_dim, layer.eps, step.threads);
}

void write_kv(const char* kv, const Layer& layer, const Step& step) {
  const int64_t stride = layer.qkv.out_features, num_pieces = 2 * layer.num_kv_heads;
  if (layer.cache_scales)
    quire_write_kv_quantized(step.dtype, int(layer.cache_dtype), kv, layer.cache, layer.cache_scales, step.slots,
                             step.num_tokens, stride, num_pieces, layer.block_size, layer.head_dim,
                             layer.cache_limit, layer.cache_min_magnitude);
  else
    quire_write_kv(itemsize(step.dtype), kv, layer.cache, step.slots, step.num_tokens, stride, num_pieces,
                   layer.block_size, layer.head_dim);
}

// Adds x, unless it is null, to the residual, and writes the residual normalized to `out`, which may be x.
void add_and_normalize(const void* x, void* residual, const void* norm, void* out, const Layer& layer,
                       const Step& step) {
  const int64_t length = layer.output.out_features;
  if (x)
    quire_add_rms_norm(step.dtype, x, residual, norm, out, step.num_tokens, length, layer.eps, step.threads);
  else
    quire_rms_norm(step.dtype, residual, norm, out, 1, step.num_tokens, 0, length, 0, length, layer.eps,
                   step.threads);
}

// Copies the residual [T, E] to rows of `aux` that are aux_stride numbers apart.
void copy_residual(const char* residual, char* aux, int64_t aux_stride, int64_t length, const Step& step) {
  const int64_t size = itemsize(step.dtype);
  for (int64_t t = 0; t < step.num_tokens; t++)
    memcpy(aux + t * aux_stride * size, residual + t * length * size, length * size);
}

}  // namespace

void multiply(const Linear& weight, const void* x, void* y, const Step& step) {
  quire_linear(int(weight.dtype), step.dtype, x, weight.matrix, weight.scales, weight.bias, y, step.num_tokens,
               weight.in_features, weight.out_features, weight.stride, step.threads);
  if (step.lora && weight.lora) quire_add_lora(step.dtype, weight.lora, step.lora, x, y, step.threads);
}

void finish(void* x, const void* norm, const Layer& layer, const Step& step) {
  const int64_t length = layer.output.out_features;
  if (norm)
    quire_rms_norm(step.dtype, x, norm, x, 1, step.num_tokens, 0, length, 0, length, layer.eps, step.threads);
  if (layer.residual_scale != 1.f)
    quire_scale(step.dtype, x, layer.residual_scale, step.num_tokens, length, step.threads);
}

void attend(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch) {
  const int64_t stride = layer.qkv.out_features, head_bytes = layer.head_dim * itemsize(step.dtype);
  char* queries = scratch.allocate(step.num_tokens * stride, step.dtype);
  char* keys = queries + layer.num_heads * head_bytes;
  char* attended = scratch.allocate(step.num_tokens * layer.output.in_features, step.dtype);
  multiply(layer.qkv, normed, queries, step);
  if (layer.q_norm) {
    normalize_heads(queries, layer.q_norm, layer.num_heads, layer, step);
    normalize_heads(keys, layer.k_norm, layer.num_kv_heads, layer, step);
  }
  if (layer.rope >= 0) {
    const Rotation& rotation = step.rotations[layer.rope];
    quire_apply_rope(step.dtype, queries, rotation.cos, rotation.sin, step.num_tokens,
                     layer.num_heads + layer.num_kv_heads, layer.head_dim, rotation.rotated_dim, stride,
                     rotation.stride, step.threads);
  }
  write_kv(keys, layer, step);
  quire_paged_decode(step.dtype, int(layer.cache_dtype), queries, layer.cache, layer.cache_scales, step.tables,
                     step.lens, attended, step.num_tokens, layer.num_heads, layer.num_kv_heads, layer.head_dim,
                     layer.block_size, step.table_stride, stride, layer.scale, layer.window, 0, layer.soft_cap,
                     nullptr, nullptr, step.threads);
  multiply(layer.output, attended, out, step);
}

void feed_forward(const Layer& layer, const Step& step, const void* normed, void* out, Scratch scratch) {
  char* gated = scratch.allocate(step.num_tokens * layer.down.in_features, step.dtype);
  const Linear& weight = layer.gate_up;
  const bool has_adapters = step.lora && weight.lora;
  if (has_adapters || weight.out_features % (2 * PANEL_LEN)) {
    char* gate_up = scratch.allocate(step.num_tokens * weight.out_features, step.dtype);
    multiply(weight, normed, gate_up, step);
    quire_gate_and_mul(step.dtype, int(layer.gate), gate_up, gated, step.num_tokens, layer.down.in_features,
                       step.threads);
  } else {
    quire_gated_linear(int(weight.dtype), step.dtype, int(layer.gate), normed, weight.matrix, weight.scales,
                       weight.bias, gated, step.num_tokens, weight.in_features, weight.out_features, weight.stride,
                       step.threads);
  }
  multiply(layer.down, gated, out, step);
}

extern "C" {

int64_t quire_decode_layer_bytes() { return sizeof(Layer); }

// Computes sublayers `begin` to `end`: sublayer 2 i is the attention of layer i, sublayer 2 i + 1 its feed-forward
// network. A sublayer reads the previous sublayer's output from x [T, E], finishes it, adds it to the residual [T, E],
// and writes its own output to x. Sublayer 0 does not read x. Sublayer 2 num_layers is the last norm, which writes the
// normalized residual to x.
//
// The input of layer i, and for i = num_layers the output of the last one, is copied to column aux_columns[i] of
// aux [T, aux_stride] unless that is negative. `aux_columns` may be null. `lora` has the tokens with adapters, or is null.
void quire_decode_layers(const Layer* layers, int64_t num_layers, const void* last_norm, int64_t begin, int64_t end,
                         int dtype, int64_t num_tokens, const Rotation* rotations, const int64_t* slots,
                         const int32_t* tables, int64_t table_stride, const int32_t* lens, void* x, void* residual,
                         void* aux, const int64_t* aux_columns, int64_t aux_stride, void* scratch, int threads,
                         const LoraGroups* lora) {
  const Step step{dtype, num_tokens, rotations, slots, tables, table_stride, lens, threads, lora};
  for (int64_t i = begin; i < end; i++) {
    const bool attends = i % 2 == 0, is_last = i == 2 * num_layers;
    const Layer& finished = layers[std::max<int64_t>(i - 1, 0) / 2];  // of sublayer i - 1
    const Layer& layer = is_last ? finished : layers[i / 2];
    const int64_t length = layer.output.out_features;
    Scratch memory{(char*)scratch};
    void* normed = is_last ? x : memory.allocate(num_tokens * length, dtype);
    const void* norm = is_last ? last_norm : attends ? layer.before_attention : layer.before_mlp;
    if (i > 0) finish(x, attends ? finished.after_mlp : finished.after_attention, finished, step);
    add_and_normalize(i > 0 ? x : nullptr, residual, norm, normed, layer, step);
    if (attends && aux_columns && aux_columns[i / 2] >= 0)
      copy_residual((const char*)residual, (char*)aux + aux_columns[i / 2] * itemsize(dtype), aux_stride, length, step);
    if (!is_last) (attends ? attend : feed_forward)(layer, step, normed, x, memory);
  }
}
}
