// Low-rank adapters of linear layers (lora.cpp).
#pragma once

#include <cstdint>

// The factors of one linear layer; kernels/native/lora.py declares the same fields in the same order.
struct LoraFactors {
  const void* a;          // [L, P, R, K]
  const void* b;          // [L, R, N]
  const int32_t* ranks;   // [L, P]
  const int32_t* starts;  // [P + 1], the first output of each part, and N
  int64_t num_parts, max_rank, in_features, out_features;
};

// The tokens of a step that have an adapter, in groups of one slot; the same as kernels.lora.LoraGroups.
struct LoraGroups {
  const int32_t* order;   // [n], rows of y
  const int32_t* inputs;  // [n], rows of x
  const int32_t* starts;  // [G + 1]
  const int32_t* slots;   // [G]
  int64_t count;
};

extern "C" void quire_add_lora(int dtype, const LoraFactors* factors, const LoraGroups* groups, const void* x, void* y,
                               int threads);
