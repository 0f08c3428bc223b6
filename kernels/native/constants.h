// Codes and sizes that C++ and Python share. Python reads them from the library when it loads the library
// (kernels/native/library.py), so this is the only list.
#pragma once

#include <cstdint>

// Element types: the code, and the name of the torch.dtype.
#define FOR_EACH_DTYPE(X) X(FLOAT32, float32) X(BFLOAT16, bfloat16) X(FLOAT16, float16) X(INT8, int8) \
  X(FLOAT8_E4M3FN, float8_e4m3fn) X(UINT8, uint8) X(FLOAT4_E2M1FN_X2, float4_e2m1fn_x2)

// Activations; gated feed-forward networks have one of the first two.
#define FOR_EACH_GATE(X) X(SILU, silu) X(GELU_TANH, gelu_tanh) X(SIGMOID, sigmoid) X(TANH, tanh)

// Values of head_dim with an attention kernel.
#define FOR_EACH_HEAD_DIM(X) X(16) X(32) X(64) X(80) X(96) X(128) X(192) X(256) X(512)

#define CODE(code, name) code,
enum DType : int { FOR_EACH_DTYPE(CODE) };
enum Gate : int { FOR_EACH_GATE(CODE) };
#undef CODE

// Bytes per element.
constexpr int64_t itemsize(int dtype) { return dtype == FLOAT32 ? 4 : dtype == BFLOAT16 || dtype == FLOAT16 ? 2 : 1; }
