// Activations of gated feed-forward networks (Shazeer, GLU Variants Improve Transformer, 2020).
#pragma once

#include "constants.h"
#include "simd.h"

// The activation of a gate value.
template <Gate GATE>
inline Vec activate(Vec g) {
  // (1 + tanh(u)) / 2 is sigmoid(2 u); the constant is 2 sqrt(2 / pi).
  const Vec exponent = GATE == SILU ? g : 1.5957691216f * (g + 0.044715f * g * g * g);
  return g / (1.f + exp_of(-exponent));
}
