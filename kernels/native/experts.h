// The experts of a mixture, whose weights are packed (experts.cpp).
#pragma once

#include "decode_layers.h"
#include "packed_quantized.h"

struct Expert {
  Linear gate_up, down;  // [2 I, E], or [I, E] without gates, and [E, I]
  const PackedQuantized *gate_up_codes, *down_codes;  // the weights, if they are quantized; else null
};

// Value of Experts.gate for experts without gates.
constexpr int64_t UNGATED_RELU_SQUARED = -1;

// Python fills this struct: kernels/native/experts.py declares the same fields in the same order.
struct Experts {
  const Expert* experts;  // of this rank
  int64_t count;
  int64_t first;       // index of the first among the experts of all ranks
  int64_t gate;        // activation
  int64_t is_clamped;  // clamps its inputs, with the gate SILU
  int64_t scales_inputs;  // the factors multiply the inputs of experts, not their results
  float alpha, limit, offset;  // of the clamped activation
};
