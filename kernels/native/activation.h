// Activations of feed-forward networks (Shazeer, GLU Variants Improve Transformer, 2020).
#pragma once

#include <algorithm>

#include "constants.h"
#include "simd.h"

// The activation of a value.
template <Gate GATE>
inline Vec activate(Vec g) {
  if constexpr (GATE == SIGMOID) return 1.f / (1.f + exp_of(-g));
  if constexpr (GATE == TANH) {
    // tanh_of has an error of 6e-8, which is much of a small number.
    const Vec square = g * g, series = g * (1.f + square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315))));
    return square < 0.02f ? series : tanh_of(g);
  }
  // (1 + tanh(u)) / 2 is sigmoid(2 u); the constant is 2 sqrt(2 / pi).
  const Vec exponent = GATE == SILU ? g : 1.5957691216f * (g + 0.044715f * g * g * g);
  return g / (1.f + exp_of(-exponent));
}

// out [count] = function of x [count], LANES at a time: a result does not depend on its place.
template <typename T, typename Function>
void map_row(const T* x, T* out, int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, function(load(x + i)));
  if (i == count) return;
  T rest[LANES] = {};
  std::copy(x + i, x + count, rest);
  store(rest, function(load(rest)));
  std::copy(rest, rest + count - i, out + i);
}

// out [I] = with(gate, up) of the halves of gate_up [2 I].
template <typename T, typename With>
void gate_row(const T* gate_up, T* out, int64_t length, const With& with) {
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) store(out + i, with(load(gate_up + i), load(gate_up + length + i)));
  if (i == length) return;
  T gate[LANES] = {}, up[LANES] = {}, result[LANES];
  std::copy(gate_up + i, gate_up + length, gate);
  std::copy(gate_up + length + i, gate_up + 2 * length, up);
  store(result, with(load(gate), load(up)));
  std::copy(result, result + length - i, out + i);
}

// The clamped activation of gpt-oss and DeepSeek-V4; see kernels/activation.py.
struct Clamped {
  float alpha, limit, offset;

  Vec operator()(Vec gate, Vec up) const {
    const Vec most = broadcast(limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    return gate / (1.f + exp_of(-alpha * gate)) * (up + offset);
  }
};
