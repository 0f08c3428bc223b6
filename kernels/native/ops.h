// Ops that other ops call. Comments stand at their definitions.
#pragma once

#include <cstdint>

extern "C" {

void quire_linear(int weight_dtype, int dtype, const void* x, const void* matrix, const float* scales, const void* bias,
                  void* y, int64_t num_tokens, int64_t in_features, int64_t out_features, int64_t panel_stride,
                  int threads);

void quire_linear_columns(int weight_dtype, int dtype, const void* x, const void* matrix, const float* scales,
                          const void* bias, void* y, int64_t y_stride, int64_t num_tokens, int64_t in_features,
                          int64_t out_features, int64_t panel_stride);

void quire_gated_linear(int weight_dtype, int dtype, int gate, const void* x, const void* matrix, const float* scales,
                        const void* bias, void* y, int64_t num_tokens, int64_t in_features, int64_t out_features,
                        int64_t panel_stride, int threads);

void quire_rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t num_outer, int64_t num_inner,
                    int64_t outer_stride, int64_t inner_stride, int64_t out_stride, int64_t length, float eps,
                    int threads);

void quire_add_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int64_t rows,
                        int64_t length, float eps, int threads);

void quire_scale(int dtype, void* x, float factor, int64_t rows, int64_t length, int threads);

void quire_gate_and_mul(int dtype, int gate, const void* gate_up, void* out, int64_t rows, int64_t length,
                        int threads);

void quire_apply_rope(int dtype, void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads,
                      int64_t head_dim, int64_t rotated_dim, int64_t token_stride, int64_t table_stride, int threads);

void quire_write_kv(int64_t element_bytes, const void* kv, void* cache, const int64_t* slots, int64_t tokens,
                    int64_t token_stride, int64_t num_pieces, int64_t block_size, int64_t head_dim);

void quire_write_kv_quantized(int dtype, int cache_dtype, const void* kv, void* cache, float* scales,
                              const int64_t* slots, int64_t tokens, int64_t token_stride, int64_t num_pieces,
                              int64_t block_size, int64_t head_dim, float limit, float min_magnitude);

int quire_paged_decode(int dtype, int cache_dtype, const void* q, const void* kv, const float* scales,
                       const int32_t* tables, const int32_t* lens, void* out, int64_t num_seqs, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t table_stride,
                       int64_t q_stride, float scale, int64_t window, int64_t chunk, float soft_cap, const float* slopes,
                       const float* sinks, int threads);

void quire_gather_rows(int weight_dtype, int dtype, const void* matrix, const float* scales, const int64_t* ids,
                       void* out, int64_t count, int64_t in_features, int64_t panel_stride, int threads);

void quire_sample_greedy(const float* logits, float* values, int32_t* token_ids, const int64_t* mask_slots,
                         const uint32_t* mask_words, int64_t mask_stride, int64_t rows, int64_t length, int64_t stride,
                         int32_t vocab_start, int threads);

void quire_sample_full(const float* logits, const float* temperature, const uint32_t* keys, float* scores,
                       int32_t* token_ids, const int64_t* mask_slots, const uint32_t* mask_words, int64_t mask_stride,
                       int64_t rows, int64_t length, int64_t stride, int32_t vocab_start, int threads);

void quire_truncate(const float* logits, float* out, int64_t length, float temperature, int64_t top_k, float top_p,
                    float min_p);
}
