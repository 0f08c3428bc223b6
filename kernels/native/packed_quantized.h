// Packed weights of 4 or 8 bits per number, with a scale per group of inputs and output.
#pragma once

#include <cstdint>

// A weight [N, K] as words [N / PANEL_LEN, K / W, PANEL_LEN], rounded up to whole panels. A word has W inputs of one
// output: 4 of 8 bits, the first in the lowest bits; or 8 of 4 bits, the even ones in the lower half and the odd ones in
// the upper half. A number is (code - zero) * scale.
//
// Python fills this struct: kernels/native/packed_quantized.py declares the same fields in the same order.
struct PackedQuantized {
  const uint32_t* words;
  const void* scales;   // [N / PANEL_LEN, G, PANEL_LEN], of scale_dtype
  const int8_t* zeros;  // in the same shape, or null if all are `zero`
  int64_t dtype;        // of the codes: FLOAT8_E4M3FN, FLOAT4_E2M1FN_X2, or UINT8 for two numbers from 0 to 15 per byte
  int64_t scale_dtype;  // FLOAT32; or UINT8 for powers of two, as the exponents of float32 from 4 to 250
  int64_t group_len, in_features, out_features;
  float zero;
};

// Writes a panel as a weight of `dtype`, float32 or bfloat16, has it (packed_weights.h): numbers are rounded to nearest.
void dequantize_panel(const PackedQuantized& weight, int64_t panel, int dtype, void* out);

// Up to this many tokens are multiplied by the numbers in registers as they are dequantized. More accumulators would not
// fit beside them.
constexpr int64_t MAX_QUANTIZED_TOKENS = 4;

// Writes the outputs of a panel, y [T, N], for 1 to MAX_QUANTIZED_TOKENS tokens x [T, K]: bit for bit the product with
// the dequantized panel. `dtype` is that of y and bias. x has it as well, or is float32 for bfloat16 where the processor
// has no products of bfloat16 (packed_weights.h, BF16::Input).
void multiply_quantized(const PackedQuantized& weight, int64_t panel, int dtype, const void* x, int64_t num_tokens,
                        const void* bias, void* y);
