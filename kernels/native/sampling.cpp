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

// Bit masks of the allowed tokens of rows; see Masks in kernels/logits.py.
struct RowMasks {
  const int64_t* slots;   // [N], a row's index into `words`; -1 for no mask; null if no row has one
  const uint32_t* words;  // [M, stride]
  int64_t stride;

  const uint32_t* of(int64_t row) const {
    return slots == nullptr || slots[row] < 0 ? nullptr : words + slots[row] * stride;
  }
};

constexpr uint32_t ALL_LANES = (1u << LANES) - 1;

// Logits of LANES tokens, -inf where a bit is 0.
Vec masked(Vec logits, uint32_t bits) {
  const BitVec lanes = __builtin_convertvector(lane_indices(), BitVec);
  return ((BitVec{} + bits) >> lanes & 1) != 0 ? logits : broadcast(-INFINITY);
}

// The largest score(logits, indices) of a row and its index; the first index wins a tie. `mask` holds the bits of the
// allowed tokens; null for all. Tokens that are not allowed are skipped, LANES of them together.
template <typename Score>
Best best_of(const float* row, int64_t length, const uint32_t* mask, const Score& score) {
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
  auto bits_at = [&](int64_t first) { return mask[first / 32] >> (first % 32) & ALL_LANES; };
  for (; i + LANES <= length; i += LANES) {
    const uint32_t bits = mask == nullptr ? ALL_LANES : bits_at(i);
    if (bits == ALL_LANES) {
      add(load(row + i));
    } else if (bits != 0) {
      add(masked(load(row + i), bits));
    } else {
      index += LANES;
    }
  }
  if (i < length) {
    float rest[LANES];
    for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < length ? row[i + lane] : -INFINITY;
    add(masked(load(rest), mask == nullptr ? ALL_LANES : bits_at(i)));
  }
  Best best{max_of(top), INT32_MAX};
  for (int lane = 0; lane < LANES; lane++)
    if (top[lane] == best.value) best.index = std::min(best.index, place[lane]);
  return best.index == INT32_MAX ? Best{best.value, 0} : best;
}

// The log of the sum of exponentials of a row, which does not depend on other rows.
float log_sum_exp(const float* row, int64_t length) {
  Vec tops = broadcast(-INFINITY), sums = {};
  const auto for_vectors = [&](const auto& body) {
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) body(load(row + i));
    if (i == length) return;
    float rest[LANES];
    for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < length ? row[i + lane] : -INFINITY;
    body(load(rest));
  };
  // Not a number, once there is one, stays.
  for_vectors([&](Vec v) { tops = (v > tops) | (v != v) ? v : tops; });
  const float top = fold(tops, [](auto a, auto b) { return (a > b) | (a != a) ? a : b; });
  if (!(std::fabs(top) < INFINITY)) return top;
  for_vectors([&](Vec v) { sums += exp_of(v - top); });
  return top + std::log(sum_of(sums));
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
// Columns of the masks that forbid a token count as -inf; null slots: no masks.
void quire_sample_greedy(const float* logits, float* values, int32_t* token_ids, const int64_t* mask_slots,
                          const uint32_t* mask_words, int64_t mask_stride, int64_t rows, int64_t length,
                          int64_t stride, int32_t vocab_start, int threads) {
  const RowMasks masks{mask_slots, mask_words, mask_stride};
  for_rows(rows, length, threads, [&](int64_t row) {
    const auto logit_of = [](Vec logit, IntVec) { return logit; };
    const Best best = best_of(logits + row * stride, length, masks.of(row), logit_of);
    values[row] = best.value;
    token_ids[row] = vocab_start + best.index;
  });
}

// As quire_sample_greedy, of logits / temperature + Gumbel noise; keys [N, 2].
void quire_sample_full(const float* logits, const float* temperature, const uint32_t* keys, float* scores,
                         int32_t* token_ids, const int64_t* mask_slots, const uint32_t* mask_words,
                         int64_t mask_stride, int64_t rows, int64_t length, int64_t stride, int32_t vocab_start,
                         int threads) {
  const RowMasks masks{mask_slots, mask_words, mask_stride};
  for_rows(rows, length, threads, [&](int64_t row) {
    const float divisor = temperature[row];
    const uint32_t key_low = keys[2 * row], key_high = keys[2 * row + 1];
    const auto score_of = [&](Vec logit, IntVec index) {
      const BitVec token_ids = __builtin_convertvector(index + vocab_start, BitVec);
      return logit / divisor + gumbel_noise(token_ids, key_low, key_high);
    };
    const Best best = best_of(logits + row * stride, length, masks.of(row), score_of);
    scores[row] = best.value;
    token_ids[row] = vocab_start + best.index;
  });
}

// out [N] = log of the sum of exponentials of each row of values [N, V].
void quire_log_sum_exp(const float* values, float* out, int64_t rows, int64_t length, int64_t stride, int threads) {
  for_rows(rows, length, threads, [&](int64_t row) { out[row] = log_sum_exp(values + row * stride, length); });
}

// Sets the logits [N, V] of tokens that the masks forbid to -inf; columns from num_tokens on stay unchanged.
void quire_mask_logits(float* logits, const int64_t* mask_slots, const uint32_t* mask_words, int64_t mask_stride,
                       int64_t rows, int64_t num_tokens, int64_t stride, int threads) {
  const RowMasks masks{mask_slots, mask_words, mask_stride};
  for_rows(rows, num_tokens, threads, [&](int64_t row) {
    const uint32_t* mask = masks.of(row);
    float* own = logits + row * stride;
    if (mask == nullptr) return;
    for (int64_t first = 0; first < num_tokens; first += 32) {
      const uint32_t bits = mask[first / 32];
      if (bits == UINT32_MAX) continue;
      const int64_t end = std::min<int64_t>(first + 32, num_tokens);
      for (int64_t i = first; i < end; i++) own[i] = bits >> (i - first) & 1 ? own[i] : -INFINITY;
    }
  });
}
}
