// Choice of each token's experts by their scores, with the results of torch.topk and torch.sum to the bit.
//
// torch.topk leaves ties in the order in which the selection algorithms of the standard library leave them, which
// depends only on the results of comparisons. Rows with a tie among the best are chosen by the same algorithms; the other
// rows have only one order, which a scan finds in a tenth of the time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "thread_pool.h"

namespace {

// Below this many scores, synchronizing threads costs more than they save.
constexpr int64_t MIN_PARALLEL = 16384;
constexpr int64_t TASK_TOKENS = 16;

struct Candidate {
  float score;
  int32_t expert;
};

// Whether torch.topk places a number before another: NaN is the largest.
inline bool precedes(float a, float b) { return (std::isnan(a) && !std::isnan(b)) || a > b; }

// The best of the scores, best first, in the first `count` candidates. Returns false if their order depends on how ties
// are broken.
bool find_distinct(const float* scores, int64_t length, int64_t count, Candidate* best) {
  float tied = NAN;  // score of a candidate that was as good as the last of the best
  for (int64_t i = 0; i < length; i++) {
    const float score = scores[i];
    const bool is_full = i >= count;
    const float last = best[count - 1].score;
    if (is_full && score <= last) {
      if (score == last) tied = last;
      continue;
    }
    if (std::isnan(score)) return false;
    int64_t place = is_full ? count - 1 : i;
    for (; place > 0 && best[place - 1].score < score; place--) best[place] = best[place - 1];
    best[place] = {score, int32_t(i)};
    if (is_full && best[count - 1].score == last) tied = last;
  }
  if (tied == best[count - 1].score) return false;
  for (int64_t i = 1; i < count; i++)
    if (best[i - 1].score == best[i].score) return false;
  return true;
}

// As torch.topk: the best of the scores, best first, in the first `count` of at least `length` candidates.
void find_best(const float* scores, int64_t length, int64_t count, std::vector<Candidate>& candidates) {
  if (find_distinct(scores, length, count, candidates.data())) return;
  for (int64_t i = 0; i < length; i++) candidates[i] = {scores[i], int32_t(i)};
  const auto compare = [](const Candidate& a, const Candidate& b) { return precedes(a.score, b.score); };
  const auto begin = candidates.begin(), end = begin + length;
  if (count * 64 <= length) {
    std::partial_sort(begin, begin + count, end, compare);
  } else {
    std::nth_element(begin, begin + count - 1, end, compare);
    std::sort(begin, begin + count - 1, compare);
  }
}

// As torch.sum adds up numbers, or corresponding numbers of vectors: in four partial sums. For less than 64 of them.
float sum_of_four(const float* numbers, int64_t stride, int64_t count) {
  float sums[4] = {};
  const int64_t whole = count / 4 * 4;
  for (int64_t i = 0; i < whole; i++) sums[i % 4] += numbers[i * stride];
  for (int64_t i = whole; i < count; i++) sums[0] += numbers[i * stride];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// As torch.sum with vectors of `lanes` numbers adds up a row of less than 64 numbers.
float sum_row(const float* numbers, int64_t count, int64_t lanes) {
  if (count < lanes) return sum_of_four(numbers, 1, count);
  float sum = 0;
  for (int64_t i = count / lanes * lanes; i < count; i++) sum += numbers[i];
  for (int64_t lane = 0; lane < lanes; lane++) sum += sum_of_four(numbers + lane, lanes, count / lanes);
  return sum;
}

struct Routing {
  int64_t num_experts, per_token, num_groups, num_top_groups, group_best, sum_lanes;
  float epsilon, scale;
};

// The choices of one token after another.
class Chooser {
 public:
  explicit Chooser(const Routing& routing)
      : own_(routing), by_(routing.num_experts), group_scores_(routing.num_groups), is_top_(routing.num_groups),
        candidates_(routing.num_experts) {}

  void choose(const float* scores, const float* correction, float* weights, int64_t* expert_ids) {
    find_best(scores_to_choose_by(scores, correction), own_.num_experts, own_.per_token, candidates_);
    for (int64_t i = 0; i < own_.per_token; i++) {
      expert_ids[i] = candidates_[i].expert;
      weights[i] = scores[expert_ids[i]];
    }
    if (own_.sum_lanes) {
      const float divisor = sum_row(weights, own_.per_token, own_.sum_lanes) + own_.epsilon;
      for (int64_t i = 0; i < own_.per_token; i++) weights[i] /= divisor;
    }
    for (int64_t i = 0; i < own_.per_token; i++) weights[i] *= own_.scale;
  }

 private:
  const float* scores_to_choose_by(const float* scores, const float* correction) {
    if (!correction && own_.num_groups == 1) return scores;
    if (correction)
      for (int64_t i = 0; i < own_.num_experts; i++) by_[i] = scores[i] + correction[i];
    else
      std::copy_n(scores, own_.num_experts, by_.begin());
    if (own_.num_groups > 1) mask_groups();
    return by_.data();
  }

  // Sets the scores outside of the best groups to -inf.
  void mask_groups() {
    const int64_t length = own_.num_experts / own_.num_groups;
    for (int64_t i = 0; i < own_.num_groups; i++) group_scores_[i] = group_score(by_.data() + i * length, length);
    find_best(group_scores_.data(), own_.num_groups, own_.num_top_groups, candidates_);
    std::fill(is_top_.begin(), is_top_.end(), false);
    for (int64_t i = 0; i < own_.num_top_groups; i++) is_top_[candidates_[i].expert] = true;
    for (int64_t i = 0; i < own_.num_groups; i++)
      if (!is_top_[i]) std::fill_n(by_.begin() + i * length, length, -INFINITY);
  }

  // The largest score of a group, or the sum of the two largest.
  float group_score(const float* scores, int64_t length) const {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < length; i++) {
      if (precedes(scores[i], first)) {
        second = first;
        first = scores[i];
      } else if (precedes(scores[i], second)) {
        second = scores[i];
      }
    }
    return own_.group_best == 1 ? first : first + second;
  }

  const Routing& own_;
  std::vector<float> by_, group_scores_;
  std::vector<bool> is_top_;
  std::vector<Candidate> candidates_;
};

}  // namespace

extern "C" {

// Writes the weights and expert_ids [T, per_token] of the experts with the best scores [T, X] of each token, or the best
// sums of score and correction [X], if it is not null, within the best groups. The weights are divided by their sum plus
// epsilon, unless sum_lanes is 0, and multiplied by `scale`. per_token is less than 64.
void quire_select_experts(const float* scores, const float* correction, float* weights, int64_t* expert_ids,
                          int64_t num_tokens, int64_t num_experts, int64_t per_token, int64_t num_groups,
                          int64_t num_top_groups, int64_t group_best, int64_t sum_lanes, float epsilon, float scale,
                          int threads) {
  const Routing routing{num_experts, per_token, num_groups, num_top_groups, group_best, sum_lanes, epsilon, scale};
  if (num_tokens * num_experts < MIN_PARALLEL) threads = 1;
  parallel_for((num_tokens + TASK_TOKENS - 1) / TASK_TOKENS, threads, [&](auto& next) {
    Chooser chooser(routing);
    for (int64_t token; (token = next() * TASK_TOKENS) < num_tokens;)
      for (const int64_t end = std::min(token + TASK_TOKENS, num_tokens); token < end; token++)
        chooser.choose(scores + token * num_experts, correction, weights + token * per_token,
                       expert_ids + token * per_token);
  });
}
}
