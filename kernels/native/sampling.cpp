// Samples one token per row of logits: the most likely one, or one of the whole softmax (kernels/sampling.py).
#include "simd.h"
#include "thread_pool.h"

namespace {

// Below this many logits one thread is faster.
constexpr int64_t MIN_PARALLEL = 65536;

// log of positive numbers, within 2 units in the last place (coefficients: Cephes' logf).
Vec log_of(Vec x) {
  BitVec bits;
  memcpy(&bits, &x, sizeof bits);
  IntVec exponent = __builtin_convertvector(bits >> 23, IntVec) - 126;
  bits = (bits & 0x7FFFFF) | 0x3F000000;
  Vec m;  // in [0.5, 1)
  memcpy(&m, &bits, sizeof m);
  const IntVec is_low = m < 0.70710678f;
  exponent += is_low;
  m = (is_low ? m + m : m) - 1.f;
  const Vec square = m * m;
  Vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vec e = __builtin_convertvector(exponent, Vec);
  return m + (p * m * square + e * -2.12194440e-4f - square * 0.5f) + e * 0.693359375f;
}

// Standard Gumbel noise of tokens; see kernels/gumbel.py.
Vec gumbel_noise(BitVec token_ids, uint32_t key_low, uint32_t key_high) {
  BitVec x = token_ids * 0x9E3779B9u + key_low;
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= key_high;
  x ^= x >> 15;
  x *= 0xD35A2D97u;
  x ^= x >> 15;
  Vec v = (__builtin_convertvector(__builtin_convertvector(x & 0x7FFFFFFF, IntVec), Vec) + 0.5f) * 0x1p-31f;
  v = v > 1 - 0x1p-24f ? broadcast(1 - 0x1p-24f) : v;
  // For small v, 1 - v loses the significant bits of v, so -log(1 - v) is computed as its series.
  const Vec series =
      v * (1.f + v * (1.f / 2 + v * (1.f / 3 + v * (1.f / 4 + v * (1.f / 5 + v * (1.f / 6))))));
  const Vec exponential = v < 1.f / 32 ? series : -log_of(1.f - v);
  return -log_of(exponential);
}

struct Best {
  float value;
  int32_t index;
};

// The largest score(logits, indices) of a row and its index; the first index wins a tie.
template <typename Score>
Best best_of(const float* row, int64_t length, const Score& score) {
  Vec top = broadcast(-INFINITY);
  IntVec place = IntVec{}, index = lane_indices();
  int64_t i = 0;
  auto add = [&](Vec logits) {
    const Vec value = score(logits, index);
    const IntVec is_better = value > top;
    top = is_better ? value : top;
    place = is_better ? index : place;
    index += LANES;
  };
  for (; i + LANES <= length; i += LANES) add(load(row + i));
  if (i < length) {
    float rest[LANES];
    for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < length ? row[i + lane] : -INFINITY;
    add(load(rest));
  }
  Best best{max_of(top), INT32_MAX};
  for (int lane = 0; lane < LANES; lane++)
    if (top[lane] == best.value) best.index = std::min(best.index, place[lane]);
  return best.index == INT32_MAX ? Best{best.value, 0} : best;
}

template <typename Body>
void for_rows(int64_t rows, int64_t length, int threads, const Body& body) {
  if (rows * length < MIN_PARALLEL) threads = 1;
  parallel_for(rows, threads, [&](auto& next) {
    for (int64_t row; (row = next()) < rows;) body(row);
  });
}

}  // namespace

extern "C" {

// Writes the values [N] and token ids [N] of the largest of logits [N, V], whose first column is token vocab_start.
void quire_sample_greedy(const float* logits, float* values, int32_t* token_ids, int64_t rows, int64_t length,
                          int64_t stride, int32_t vocab_start, int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    const Best best = best_of(logits + row * stride, length, [](Vec logit, IntVec) { return logit; });
    values[row] = best.value;
    token_ids[row] = vocab_start + best.index;
  });
}

// As quire_sample_greedy, of logits / temperature + Gumbel noise; keys [N, 2].
void quire_sample_full(const float* logits, const float* temperature, const uint32_t* keys, float* scores,
                         int32_t* token_ids, int64_t rows, int64_t length, int64_t stride, int32_t vocab_start,
                         int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    const float divisor = temperature[row];
    const uint32_t key_low = keys[2 * row], key_high = keys[2 * row + 1];
    const Best best = best_of(logits + row * stride, length, [&](Vec logit, IntVec index) {
      const BitVec token_ids = __builtin_convertvector(index + vocab_start, BitVec);
      return logit / divisor + gumbel_noise(token_ids, key_low, key_high);
    });
    scores[row] = best.value;
    token_ids[row] = vocab_start + best.index;
  });
}
}
