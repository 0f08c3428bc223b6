// Dequantizes weights in panels, a panel at a time: it stays in the cache for the product that follows.
#include "packed_quantized.h"

#include <algorithm>
#include <type_traits>

#include "packed_weights.h"
#include "thread_pool.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

template <int DTYPE>
constexpr int WORD_INPUTS = DTYPE == FLOAT8_E4M3FN ? 4 : 8;
constexpr float FLOAT4_BIAS = 0x1p126f;
// Of float32's exponent, without its bias.
constexpr int EXPONENT_SHIFT = 23, EXPONENT_BIAS = 127;

inline Vec as_floats(BitVec bits) {
  Vec v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

// The codes of input i of each word.
template <int DTYPE>
inline Vec codes_of(BitVec words, int i) {
  if constexpr (DTYPE == FLOAT8_E4M3FN) {
    // The arithmetic shift moves exponent and mantissa to their places, and leaves the sign.
    const IntVec shifted = (IntVec)(words << (24 - 8 * i)) >> 4;
    return as_floats((BitVec)shifted & 0x87F00000u) * FP8_BIAS;
  }
  const BitVec shifted = words >> (i % 2 * 16 + i / 2 * 4);
  if constexpr (DTYPE == UINT8) return __builtin_convertvector((IntVec)(shifted & 15u), Vec);
#if defined(__AVX512F__)
  // The shift below makes 0.5 a denormal number, which doubles the time. The permutation reads 4 bits of an index.
  alignas(64) static constexpr float NUMBERS[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                                    -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  return (Vec)_mm512_permutexvar_ps((__m512i)shifted, _mm512_load_ps(NUMBERS));
#else
  return as_floats((shifted & 8u) << 28 | (shifted & 7u) << 22) * FLOAT4_BIAS;
#endif
}

// Two adjacent inputs of LANES outputs, as a panel in T has them.
template <typename T>
struct Pair;

template <>
struct Pair<float> {
  Vec even, odd;

  Pair(Vec even, Vec odd) : even(even), odd(odd) {}

  void store_to(float* row) const {
    store(row, even);
    store(row + PANEL_LEN, odd);
  }
  void add_to(Vec& sums, const float* x) const {
    sums = multiply_add(x[0], even, sums);
    sums = multiply_add(x[1], odd, sums);
  }
};

template <>
struct Pair<f16> {
  Vec even, odd;

  Pair(Vec even, Vec odd) : even(rounded<f16>(even)), odd(rounded<f16>(odd)) {}

  void store_to(f16* row) const {
    store(row, even);
    store(row + PANEL_LEN, odd);
  }
  void add_to(Vec& sums, const float* x) const {
    sums = multiply_add(x[0], even, sums);
    sums = multiply_add(x[1], odd, sums);
  }
};

template <>
struct Pair<bf16> {
  BitVec bits;

  explicit Pair(BitVec bits) : bits(bits) {}

  Pair(Vec even, Vec odd) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    bits = (BitVec)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
#else
    const auto rounded_bits = [](Vec v) {
      BitVec own;
      memcpy(&own, &v, sizeof own);
      return own + 0x7FFF + ((own >> 16) & 1);
    };
    bits = rounded_bits(even) >> 16 | (rounded_bits(odd) & 0xFFFF0000u);
#endif
  }

  void store_to(bf16* row) const { memcpy(row, &bits, sizeof bits); }
#if defined(__AVX512BF16__)
  void add_to(Vec& sums, const bf16* x) const { BF16::add(sums, (BF16::Columns)bits, x); }
#else
  void add_to(Vec& sums, const float* x) const {
    sums = multiply_add(x[0], as_floats(bits << 16), sums);
    sums = multiply_add(x[1], as_floats(bits & 0xFFFF0000u), sums);
  }
#endif
};

// The type of tokens that pairs are multiplied by.
template <typename T>
using Input = typename FormatOf<T>::Input;

inline Vec load_scales(const PackedQuantized& weight, int64_t at) {
  if (weight.scale_dtype == FLOAT32) return load((const float*)weight.scales + at);
  UnsignedByteVec exponents;
  memcpy(&exponents, (const uint8_t*)weight.scales + at, sizeof exponents);
  return as_floats(__builtin_convertvector(__builtin_convertvector(exponents, HalfVec), BitVec) << EXPONENT_SHIFT);
}

// Scales and zeros of a group of one panel.
struct Group {
  Vec scales[PANEL_VECTORS], zeros[PANEL_VECTORS];

  Group(const PackedQuantized& weight, int64_t at) {
    for (int v = 0; v < PANEL_VECTORS; v++) {
      scales[v] = load_scales(weight, at + v * LANES);
      zeros[v] = weight.zeros ? load(weight.zeros + at + v * LANES) : broadcast(weight.zero);
    }
  }
};

// Calls sink(input, vector, pair) for the inputs, counted from the first row, of each vector of outputs.
template <int DTYPE, typename T, typename Sink>
inline void for_pairs(const uint32_t* words, int64_t rows, const Group& group, const Sink& sink) {
  constexpr int INPUTS = WORD_INPUTS<DTYPE>;
  for (int64_t row = 0; row < rows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) {
      BitVec own;
      memcpy(&own, words + row * PANEL_LEN + v * LANES, sizeof own);
      const auto number = [&](int i) {
        const Vec codes = codes_of<DTYPE>(own, i);
        return (DTYPE == UINT8 ? codes - group.zeros[v] : codes) * group.scales[v];
      };
#pragma GCC unroll 4
      for (int i = 0; i < INPUTS; i += 2) sink(row * INPUTS + i, v, Pair<T>(number(i), number(i + 1)));
    }
  }
}

#if defined(__AVX512BW__)
// As for_pairs for float4 and powers of two: a table gives the numbers in bfloat16, and the exponents are added.
template <typename Sink>
inline void for_mxfp4_pairs(const uint32_t* words, int64_t rows, const uint8_t* exponents, const Sink& sink) {
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives; twice, since the permutation reads 5 bits of an index.
  alignas(64) static constexpr uint16_t NUMBERS[32] = {
      0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
      0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
      0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
  const __m512i numbers = _mm512_load_si512(NUMBERS), magnitude = _mm512_set1_epi16(7);
  __m512i powers[PANEL_VECTORS];  // in both halves of each word
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + v * LANES)));
    const __m512i power = _mm512_slli_epi32(_mm512_sub_epi32(wide, _mm512_set1_epi32(EXPONENT_BIAS)), 7);
    powers[v] = _mm512_or_si512(_mm512_and_si512(power, _mm512_set1_epi32(0xFFFF)), _mm512_slli_epi32(power, 16));
  }
  for (int64_t row = 0; row < rows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) {
      const auto pair = [&](__m512i codes) {
        const __mmask32 is_nonzero = _mm512_test_epi16_mask(codes, magnitude);
        const __m512i found = _mm512_permutexvar_epi16(codes, numbers);
        return Pair<bf16>((BitVec)_mm512_mask_add_epi16(found, is_nonzero, found, powers[v]));
      };
      const __m512i own = _mm512_loadu_si512(words + row * PANEL_LEN + v * LANES);
      sink(row * 8, v, pair(own));
      sink(row * 8 + 2, v, pair(_mm512_srli_epi16(own, 4)));
      sink(row * 8 + 4, v, pair(_mm512_srli_epi16(own, 8)));
      sink(row * 8 + 6, v, pair(_mm512_srli_epi16(own, 12)));
    }
  }
}
#endif

// Calls sink(input, vector, pair) for all inputs of a panel.
template <int DTYPE, typename T, typename Sink>
inline void for_panel(const PackedQuantized& weight, int64_t panel, const Sink& sink) {
  const int64_t num_groups = weight.in_features / weight.group_len;
  const int64_t rows = weight.group_len / WORD_INPUTS<DTYPE>;
  const uint32_t* words = weight.words + panel * num_groups * rows * PANEL_LEN;
  for (int64_t i = 0; i < num_groups; i++, words += rows * PANEL_LEN) {
    const int64_t at = (panel * num_groups + i) * PANEL_LEN, first = i * weight.group_len;
    const auto from_first = [&](int64_t input, int v, const Pair<T>& pair) { sink(first + input, v, pair); };
#if defined(__AVX512BW__)
    if constexpr (DTYPE == FLOAT4_E2M1FN_X2 && std::is_same_v<T, bf16>)
      if (weight.scale_dtype == UINT8) {
        for_mxfp4_pairs(words, rows, (const uint8_t*)weight.scales + at, from_first);
        continue;
      }
#endif
    for_pairs<DTYPE, T>(words, rows, Group(weight, at), from_first);
  }
}

template <int DTYPE, typename T>
void dequantize(const PackedQuantized& weight, int64_t panel, T* out) {
  constexpr int64_t VECTOR = LANES * ROW_INPUTS<FormatOf<T>>;
  for_panel<DTYPE, T>(weight, panel, [&](int64_t input, int v, const Pair<T>& pair) {
    pair.store_to(out + input * PANEL_LEN + v * VECTOR);
  });
}

// y [M, N] gets the outputs of a panel for M tokens x [M, K].
template <int DTYPE, typename T, int M>
void multiply_tokens(const PackedQuantized& weight, int64_t panel, const Input<T>* x, const T* bias, T* y) {
  Vec sums[M][PANEL_VECTORS] = {};
  for_panel<DTYPE, T>(weight, panel, [&](int64_t input, int v, const Pair<T>& pair) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) pair.add_to(sums[m][v], x + m * weight.in_features + input);
  });
  const int64_t begin = panel * PANEL_LEN, width = std::min<int64_t>(PANEL_LEN, weight.out_features - begin);
  float of_token[PANEL_LEN];
  for (int m = 0; m < M; m++) {
    for (int v = 0; v < PANEL_VECTORS; v++) store(of_token + v * LANES, sums[m][v]);
    for (int64_t n = 0; n < width; n++)
      store_one(y + m * weight.out_features + begin + n, of_token[n] + (bias ? to_float(bias[begin + n]) : 0.f));
  }
}

template <int DTYPE, typename T>
void multiply_few(const PackedQuantized& weight, int64_t panel, const Input<T>* x, int64_t num_tokens, const T* bias,
                  T* y) {
  switch (num_tokens) {
    case 1: return multiply_tokens<DTYPE, T, 1>(weight, panel, x, bias, y);
    case 2: return multiply_tokens<DTYPE, T, 2>(weight, panel, x, bias, y);
    case 3: return multiply_tokens<DTYPE, T, 3>(weight, panel, x, bias, y);
    default: return multiply_tokens<DTYPE, T, MAX_QUANTIZED_TOKENS>(weight, panel, x, bias, y);
  }
}

// Calls body(code) with the dtype of the codes as a constant.
template <typename Body>
void with_codes(int64_t dtype, const Body& body) {
  if (dtype == FLOAT8_E4M3FN)
    body(std::integral_constant<int, FLOAT8_E4M3FN>{});
  else if (dtype == FLOAT4_E2M1FN_X2)
    body(std::integral_constant<int, FLOAT4_E2M1FN_X2>{});
  else
    body(std::integral_constant<int, UINT8>{});
}

}  // namespace

void dequantize_panel(const PackedQuantized& weight, int64_t panel, int dtype, void* out) {
  with_codes(weight.dtype, [&](auto codes) {
    with_dtype(dtype, [&](auto t) { dequantize<codes()>(weight, panel, (decltype(t)*)out); });
  });
}

void multiply_quantized(const PackedQuantized& weight, int64_t panel, int dtype, const void* x, int64_t num_tokens,
                        const void* bias, void* y) {
  with_codes(weight.dtype, [&](auto codes) {
    with_dtype(dtype, [&](auto t) {
      using T = decltype(t);
      multiply_few<codes()>(weight, panel, (const Input<T>*)x, num_tokens, (const T*)bias, (T*)y);
    });
  });
}

extern "C" {

int64_t quire_packed_quantized_bytes() { return sizeof(PackedQuantized); }

// out [N / PANEL_LEN, K PANEL_LEN]: all panels.
void quire_dequantize(const PackedQuantized* weight, int dtype, void* out, int threads) {
  const int64_t num_panels = (weight->out_features + PANEL_LEN - 1) / PANEL_LEN;
  const int64_t panel_bytes = weight->in_features * PANEL_LEN * itemsize(dtype);
  parallel_for(num_panels, threads, [&](auto& next) {
    for (int64_t panel; (panel = next()) < num_panels;)
      dequantize_panel(*weight, panel, dtype, (char*)out + panel * panel_bytes);
  });
}
}
