// Truncation of logits by top_k, top_p and min_p for drafted tokens, as kernels/sampling.py describes it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops.h"

namespace {

// Most likely tokens that are looked at: few, and if these are all kept more. A row that keeps even more is not
// truncated: its draft is wrong only where the target model's truncation would have excluded it.
constexpr int64_t NUM_CANDIDATES[] = {64, 1024};

// The number of the most likely tokens, in `order`, that the parameters keep; at least 1.
int64_t count_kept(const float* logits, const std::vector<int32_t>& order, int64_t count, double log_total,
                   float temperature, int64_t top_k, float top_p, float min_p) {
  const double top = logits[order[0]] / temperature;
  double before = 0;
  for (int64_t i = 0; i < std::min(count, top_k); i++) {
    const double value = logits[order[i]] / temperature;
    if (i && (before >= top_p || value < top + std::log(double(min_p)))) return i;
    before += std::exp(value - log_total);
  }
  return std::min(count, top_k);
}

}  // namespace

extern "C" {

// Copies logits [V] to `out`, with -inf for tokens that the parameters exclude, unless most stay.
void quire_truncate(const float* logits, float* out, int64_t length, float temperature, int64_t top_k, float top_p,
                    float min_p) {
  std::copy_n(logits, length, out);
  std::vector<int32_t> order(length);
  std::iota(order.begin(), order.end(), 0);
  const auto precedes = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  for (const int64_t candidates : NUM_CANDIDATES) {
    const int64_t count = std::min(length, candidates);
    if (top_k > count && count < length && top_k < length) continue;
    if (count < length) std::nth_element(order.begin(), order.begin() + count - 1, order.end(), precedes);
    std::sort(order.begin(), order.begin() + count, precedes);
    // top_p is relative to the tokens that top_k keeps.
    const float top = logits[order[0]] / temperature;
    double total = 0;
    for (int64_t i = 0; i < std::min(length, top_k); i++) total += std::exp(double(logits[order[i]] / temperature - top));
    const int64_t num_kept =
        count_kept(logits, order, count, top + std::log(total), temperature, top_k, top_p, min_p);
    if (num_kept == count && count < std::min(length, top_k)) continue;
    std::fill_n(out, length, -INFINITY);
    for (int64_t i = 0; i < num_kept; i++) out[order[i]] = logits[order[i]];
    return;
  }
}
}
