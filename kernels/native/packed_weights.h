// Packed weights of linear layers, and the formats of their numbers.
//
// A weight [N, K] is packed in panels of PANEL_LEN outputs. Each row of a panel holds one input per output in float32,
// two in bfloat16 and four in int8; float16 is stored as float32 is. The inputs of one output are adjacent.
#pragma once

#include <type_traits>

#include "constants.h"
#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// A tile of 6 tokens by one row of a panel has as many accumulators as the registers can hold beside the row.
constexpr int PANEL_VECTORS = NUM_REGISTERS == 32 ? 4 : 2;
constexpr int PANEL_LEN = PANEL_VECTORS * LANES;

// Formats. Number: the stored type; Input: the type of the tokens; STEPS: the products that add one row to an output;
// STEP_INPUTS: the inputs of one product; Columns: the numbers of one product for LANES outputs, in a register.
struct F32 {
  using Number = float;
  using Input = float;
  using Columns = Vec;
  static constexpr int STEPS = 1, STEP_INPUTS = 1;

  static Columns columns(const Number* row, int) { return load(row); }
  static void add(Vec& sums, Columns w, const Input* x) { sums = multiply_add(*x, w, sums); }
  static float widen(Number w) { return w; }
};

struct F16 {
  using Number = f16;
  using Input = float;
  using Columns = Vec;
  static constexpr int STEPS = 1, STEP_INPUTS = 1;

  static Columns columns(const Number* row, int) { return load(row); }
  static void add(Vec& sums, Columns w, const Input* x) { sums = multiply_add(*x, w, sums); }
  static float widen(Number w) { return to_float(w); }
};

struct I8 {
  using Number = int8_t;
  using Input = float;
  using Columns = Vec;
  static constexpr int STEPS = 4, STEP_INPUTS = 1;

  static Columns columns(const Number* row, int step) {
    IntVec fours;
    memcpy(&fours, row, sizeof fours);
    return __builtin_convertvector(fours << (24 - 8 * step) >> 24, Vec);
  }
  static void add(Vec& sums, Columns w, const Input* x) { sums = multiply_add(*x, w, sums); }
  static float widen(Number w) { return w; }
};

#if defined(__AVX512BF16__)
// One instruction multiplies pairs of bfloat16 and adds both products to a float32.
struct BF16 {
  using Number = bf16;
  using Input = bf16;
  using Columns = __m512bh;
  static constexpr int STEPS = 1, STEP_INPUTS = 2;

  static Columns columns(const Number* row, int) {
    Columns pairs;
    memcpy(&pairs, row, sizeof pairs);
    return pairs;
  }
  static void add(Vec& sums, Columns w, const Input* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    sums = (Vec)_mm512_dpbf16_ps((__m512)sums, w, (__m512bh)_mm512_set1_epi32(pair));
  }
  static float widen(Number w) { return to_float(w); }
};
#else
struct BF16 {
  using Number = bf16;
  using Input = float;
  using Columns = Vec;
  static constexpr int STEPS = 2, STEP_INPUTS = 1;

  static Columns columns(const Number* row, int step) {
    BitVec pairs;
    memcpy(&pairs, row, sizeof pairs);
    const BitVec bits = step ? pairs & 0xFFFF0000u : pairs << 16;
    Columns w;
    memcpy(&w, &bits, sizeof bits);
    return w;
  }
  static void add(Vec& sums, Columns w, const Input* x) { sums = multiply_add(*x, w, sums); }
  static float widen(Number w) { return to_float(w); }
};
#endif

// Inputs per row of a panel.
template <typename Format>
constexpr int ROW_INPUTS = Format::STEPS * Format::STEP_INPUTS;

// Whether numbers are converted before they are multiplied.
template <typename Format>
constexpr bool IS_CONVERTED = !std::is_same_v<typename Format::Number, typename Format::Input>;

// The format of a weight in the type of its tokens.
template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, float>, F32, std::conditional_t<std::is_same_v<T, f16>, F16, BF16>>;

// A packed weight.
template <typename Format>
struct PackedMatrix {
  const typename Format::Number* data;
  int64_t stride;       // numbers per panel
  int64_t in_features;  // a multiple of ROW_INPUTS
  int64_t out_features;
  const float* scales;  // [N], multiply the products; or null

  int64_t count() const { return (out_features + PANEL_LEN - 1) / PANEL_LEN; }
};
