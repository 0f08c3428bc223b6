// Vectors of the target's register width in the vector extensions of GCC and Clang: one source for AVX-512, AVX2 and
// NEON. Do not compile with -ffast-math: the ops rely on infinities and NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "constants.h"

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));
typedef int16_t ShortVec __attribute__((vector_size(2 * LANES)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));
typedef uint8_t UnsignedByteVec __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

// The code of a type of tokens.
template <typename T>
constexpr int DTYPE_OF = FLOAT32;
template <>
inline constexpr int DTYPE_OF<bf16> = BFLOAT16;
template <>
inline constexpr int DTYPE_OF<f16> = FLOAT16;

// Calls body(T{}) with the type of tokens that has a code.
template <typename Body>
auto with_dtype(int dtype, const Body& body) {
  return dtype == BFLOAT16 ? body(bf16{}) : dtype == FLOAT16 ? body(f16{}) : body(float{});
}

// Evaluates a call with T, the type of tokens that has the code `dtype`.
#define FOR_DTYPE(call)                 \
  do {                                  \
    with_dtype(dtype, [&](auto token) { \
      using T = decltype(token);        \
      call;                             \
    });                                 \
  } while (0)

// float8_e4m3: 4 bits of exponent, 3 of mantissa.
struct fp8 {
  uint8_t bits;
};

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
  BitVec bits = __builtin_convertvector(half, BitVec) << 16;
  Vec v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vec load(const f16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)half);
#else
  // The exponent is corrected: float32's bias is 127, float16's is 15. That of infinities and NaN is the largest.
  const BitVec wide = __builtin_convertvector(half, BitVec), magnitude = (wide & 0x7FFF) << 13;
  Vec v;
  memcpy(&v, &magnitude, sizeof v);
  v *= 0x1p112f;
  BitVec bits;
  memcpy(&bits, &v, sizeof bits);
  bits |= (wide & 0x8000) << 16 | (magnitude >= (0x7C00u << 13) ? BitVec{} + 0x7F800000u : BitVec{});
  memcpy(&v, &bits, sizeof v);
  return v;
#endif
}

// Widens from 8 to 16 to 32 bits: GCC 12 converts from 8 to 32 element by element, which takes 5 times as long.
inline Vec load(const int8_t* p) {
  ByteVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, ShortVec), IntVec), Vec);
}

// Corrects the exponent: float32's bias is 127, float8_e4m3's is 7, and 127 - 7 is 120.
constexpr float FP8_BIAS = 0x1p120f;

inline Vec load(const fp8* p) {
  UnsignedByteVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  const BitVec wide = __builtin_convertvector(__builtin_convertvector(bytes, HalfVec), BitVec);
  const BitVec bits = (wide & 0x80) << 24 | (wide & 0x7F) << 20;
  Vec v;
  memcpy(&v, &bits, sizeof v);
  return v * FP8_BIAS;
}

inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);  // denormal numbers become 0
  memcpy(p, &rounded, sizeof rounded);
#else
  BitVec bits;
  memcpy(&bits, &v, sizeof v);
  BitVec rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  HalfVec half = __builtin_convertvector(v == v ? rounded : (BitVec{} + 0x7FC0), HalfVec);
  memcpy(p, &half, sizeof half);
#endif
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(f16* p, Vec v) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  BitVec bits;
  memcpy(&bits, &v, sizeof bits);
  const BitVec magnitude = bits & 0x7FFFFFFF;
  // Numbers below 2^-14 have float16's fixed point: the last bit of the sum with 0.5 is worth 2^-24.
  Vec fixed;
  memcpy(&fixed, &magnitude, sizeof fixed);
  fixed += 0.5f;
  BitVec denormal;
  memcpy(&denormal, &fixed, sizeof denormal);
  denormal -= 0x3F000000;
  const BitVec normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  BitVec rounded = magnitude < (113u << 23) ? denormal : normal;
  rounded = magnitude >= (143u << 23) ? BitVec{} + 0x7C00 : rounded;  // 2^16 and infinities
  rounded = magnitude > 0x7F800000u ? BitVec{} + 0x7E00 : rounded;
  const HalfVec half = __builtin_convertvector(rounded | bits >> 31 << 15, HalfVec);
#endif
  memcpy(p, &half, sizeof half);
}

// Rounds to nearest, halves up. For numbers from -127 to 127.
inline void store(int8_t* p, Vec v) {
  // Shifted above 0, where the truncating conversion rounds down.
  const ByteVec bytes = __builtin_convertvector(__builtin_convertvector(v + 128.5f, IntVec) - 128, ByteVec);
  memcpy(p, &bytes, sizeof bytes);
}

// Rounds to nearest, ties to even. For numbers from -448 to 448.
inline void store(fp8* p, Vec v) {
  const Vec scaled = v / FP8_BIAS;
  BitVec bits;
  memcpy(&bits, &scaled, sizeof bits);
  const BitVec magnitude = bits & 0x7FFFFFFF;
  const BitVec rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20 | (bits >> 31) << 7;
  const UnsignedByteVec bytes = __builtin_convertvector(rounded, UnsignedByteVec);
  memcpy(p, &bytes, sizeof bytes);
}

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(fp8 x) {
  const uint32_t bits = uint32_t(x.bits & 0x80) << 24 | uint32_t(x.bits & 0x7F) << 20;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f * FP8_BIAS;
}

inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const f16 numbers[LANES] = {x};
  return load(numbers)[0];
#endif
}

inline Vec broadcast(float x) { return Vec{} + x; }

// a * b + c, rounded once where the processor can. Sums that several instances of a template compute, for other numbers
// of tokens, need it: compilers contract a multiplication and an addition in most places only.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Vec multiply_add(float a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return multiply_add((Vec)_mm512_set1_ps(a), b, c);
#elif defined(__FMA__)
  return multiply_add((Vec)_mm256_set1_ps(a), b, c);
#elif defined(__aarch64__)
  return multiply_add((Vec)vdupq_n_f32(a), b, c);
#else
  return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Stores one number with the rounding of a vector store.
inline void store_one(float* to, float value) { *to = value; }

// The numbers as they are after a store to memory of type T.
template <typename T>
inline Vec rounded(Vec v) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  T numbers[LANES];
  store(numbers, v);
  return load(numbers);
}

template <typename T>
inline void store_one(T* to, float value) {
  T rounded[LANES];
  store(rounded, broadcast(value));
  *to = rounded[0];
}

// to [count] = from [count], rounded to nearest.
template <typename To, typename From>
inline void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; i++) store_one(to + i, to_float(from[i]));
}

inline IntVec lane_indices() {
  IntVec lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  return lanes;
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Reduces a vector by folding its halves onto each other until one number is left.
template <typename Fold>
inline float fold(Vec v, Fold with) {
  typedef float Quad __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  typedef float Oct __attribute__((vector_size(32)));
  const Oct oct = with(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                       __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX__)
  const Vec oct = v;
#endif
#if defined(__AVX__)
  const Quad quad =
      with(__builtin_shufflevector(oct, oct, 0, 1, 2, 3), __builtin_shufflevector(oct, oct, 4, 5, 6, 7));
#else
  const Quad quad = v;
#endif
  const Quad pair = with(quad, __builtin_shufflevector(quad, quad, 2, 3, 0, 1));
  return with(pair, __builtin_shufflevector(pair, pair, 1, 0, 3, 2))[0];
}

inline float sum_of(Vec v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}

inline float max_of(Vec v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Folds adjacent pairs: those of `a` in the lower half, those of `b` in the upper half.
template <typename Fold>
inline Vec fold_pairs(Vec a, Vec b, Fold with) {
#if defined(__AVX512F__)
  return with(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
              __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#elif defined(__AVX__)
  return with(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
              __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15));
#else
  return with(__builtin_shufflevector(a, b, 0, 2, 4, 6), __builtin_shufflevector(a, b, 1, 3, 5, 7));
#endif
}

// Folds each of LANES vectors to one number, which is its lane of the result; overwrites the vectors.
template <typename Fold>
inline Vec fold_each(Vec* v, Fold with) {
  for (int count = LANES; count > 1; count /= 2)
    for (int i = 0; i < count / 2; i++) v[i] = fold_pairs(v[2 * i], v[2 * i + 1], with);
  return v[0];
}

inline Vec sums_of(Vec* v) {
  return fold_each(v, [](Vec a, Vec b) { return a + b; });
}

inline Vec maxima_of(Vec* v) { return fold_each(v, larger); }

// One step of a recursive transpose: swaps the upper right and lower left quarters of each square of 2 HALF rows, then
// transposes the quarters.
template <int HALF, int... LANE>
inline void swap_quarters(Vec* rows, std::integer_sequence<int, LANE...> lanes) {
  for (int i = 0; i < LANES; i++) {
    if (i & HALF) continue;
    const Vec upper = rows[i], lower = rows[i + HALF];
    rows[i] = __builtin_shufflevector(upper, lower, (LANE & HALF ? LANES + LANE - HALF : LANE)...);
    rows[i + HALF] = __builtin_shufflevector(upper, lower, (LANE & HALF ? LANES + LANE : LANE + HALF)...);
  }
  if constexpr (HALF > 1) swap_quarters<HALF / 2>(rows, lanes);
}

// Transposes a square of LANES rows.
inline void transpose(Vec* rows) {
  swap_quarters<LANES / 2>(rows, std::make_integer_sequence<int, LANES>());
}

// exp within 2 units in the last place: 2^n times a polynomial of the remainder (coefficients: Cephes' expf). 0 below
// -87.
inline Vec exp_of(Vec x) {
  const Vec clamped = x > 88.f ? broadcast(88.f) : x;
  const Vec scaled = clamped * 1.44269504f;
  const IntVec n = __builtin_convertvector(scaled + (scaled < 0.f ? broadcast(-0.5f) : broadcast(0.5f)), IntVec);
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const IntVec exponent = (n + 127) << 23;
  Vec power;
  memcpy(&power, &exponent, sizeof power);
  return x < -87.f ? Vec{} : p * power;
}

// exp of numbers up to 0, at least exp(-86), in half as many instructions as exp_of. Its relative error is 2e-7 near 0 and
// grows to 1e-6 at -86, or 5e-6 without fused multiply-add: for a softmax, which adds such numbers to a 1. The polynomial
// is 2^f for |f| <= 1/2 within 1.1e-7, and 1 for f = 0.
inline Vec exp_of_negative(Vec x) {
  constexpr float LOG2_E = 1.44269504f, SHIFTER = 0x1.8p23f;  // adding it rounds to an integer, in the lowest bits
  const Vec clamped = larger(broadcast(-86.f), x);  // NaN stays NaN
  const Vec shifted = clamped * LOG2_E + SHIFTER, f = clamped * LOG2_E - (shifted - SHIFTER);
  Vec p = f * 1.32647285e-3f + 9.67151672e-3f;
  p = p * f + 5.55073395e-2f;
  p = p * f + 2.40222424e-1f;
  p = p * f + 6.93147004e-1f;
  p = p * f + 1.f;
  BitVec bits, exponent;
  memcpy(&bits, &p, sizeof p);
  memcpy(&exponent, &shifted, sizeof shifted);
  bits += exponent << 23;
  memcpy(&p, &bits, sizeof p);
  return p;
}

inline Vec tanh_of(Vec x) { return 1.f - 2.f / (exp_of(2.f * x) + 1.f); }
