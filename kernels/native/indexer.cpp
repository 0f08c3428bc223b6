// The indexer of sparse latent attention (kernels/sparse_latent.py): scores of cached tokens, and the choice of the best.
#include <cstring>
#include <functional>

#include "ops.h"
#include "thread_pool.h"
#include "tiles.h"

namespace {

// Queries times heads that share each tile of keys, and keys of a task.
constexpr int64_t INDEX_ROWS = 96;
constexpr int64_t INDEX_KEYS = 256;
// Keys times numbers of a key, over all queries and heads, below which one thread is faster than several.
constexpr int64_t MIN_PARALLEL = 1 << 16;
// Bits of a score by which the first pass of a choice tells scores apart.
constexpr int CHOICE_BITS = 11;

// Keys `key_begin` to `key_end` for adjacent queries of one sequence.
struct IndexTask {
  int64_t begin, end, key_begin, key_end;
};

struct Indexer {
  int dtype;
  const void* q;
  const float* weights;
  PagedRows keys;
  const int32_t* tables;
  const int64_t* rows;
  const int32_t* lens;
  float* scores;
  int64_t num_tokens, num_heads, table_stride, q_stride, width, top_k;

  std::vector<IndexTask> tasks() const {
    const int64_t max_queries = std::max<int64_t>(1, INDEX_ROWS / num_heads);
    std::vector<IndexTask> all;
    for (int64_t begin = 0, end; begin < num_tokens; begin = end) {
      int64_t longest = 0;
      for (end = begin; end < num_tokens && end - begin < max_queries && rows[end] == rows[begin]; end++)
        longest = std::max<int64_t>(longest, lens[end]);
      for (int64_t first = 0; longest > top_k && first < longest; first += INDEX_KEYS)
        all.push_back({begin, end, first, std::min(first + INDEX_KEYS, longest)});
    }
    return all;
  }

  // Writes the scores of `count` keys: the heads' rectified products, weighted and added in the order of heads.
  void combine(const float* products, const float* own_weights, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i += LANES) {
      Vec sum{};
      for (int64_t h = 0; h < num_heads; h++)
        sum += own_weights[h] * larger(load(products + h * KEY_TILE + i), Vec{});
      if (i + LANES <= count)
        store(out + i, sum);
      else
        memcpy(out + i, &sum, (count - i) * sizeof(float));
    }
  }

  void score(int threads) const {
    const std::vector<IndexTask> all = tasks();
    const int64_t dim = keys.dim;
    if (int64_t(all.size()) * INDEX_KEYS * dim < MIN_PARALLEL) threads = 1;
    parallel_for(int64_t(all.size()), threads, [&](auto& next) {
      const int64_t max_rows = padded_rows(std::max(INDEX_ROWS, num_heads));
      Floats queries(max_rows * dim), scratch(KEY_TILE * dim), columns(dim * KEY_TILE), products(max_rows * KEY_TILE);
      for (size_t i; (i = next()) < all.size();) {
        const IndexTask& task = all[i];
        const int64_t num_rows = (task.end - task.begin) * num_heads;
        for (int64_t row = 0; row < num_rows; row++) {
          const int64_t from = (task.begin + row / num_heads) * q_stride + row % num_heads * dim;
          for (int64_t d = 0; d < dim; d += LANES) store(&queries[row * dim + d], load_as(dtype, q, from + d));
        }
        for (int64_t at = task.key_begin; at < task.key_end; at += KEY_TILE) {
          const int64_t count = std::min<int64_t>(KEY_TILE, task.key_end - at);
          keys.read(tables + rows[task.begin] * table_stride, at, count, scratch.data());
          transpose_rows(scratch.data(), count, dim, columns.data());
          matmul(queries.data(), dim, columns.data(), KEY_TILE, products.data(), KEY_TILE, padded_rows(num_rows), dim,
                 padded_columns(count), false);
          for (int64_t token = task.begin; token < task.end; token++)
            combine(&products[(token - task.begin) * num_heads * KEY_TILE], weights + token * num_heads, count,
                    scores + token * width + at);
        }
      }
    });
  }
};

// A number that is larger for larger scores; equal for both zeros.
inline uint32_t ordered(float score) {
  score += 0.f;
  uint32_t bits;
  memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns the k-th largest of n scores. The first bits of all scores leave few candidates (radix selection).
float find_kth(const float* scores, int64_t n, int64_t k, std::vector<float>& candidates) {
  constexpr int SHIFT = 32 - CHOICE_BITS;
  int32_t histogram[1 << CHOICE_BITS] = {};
  for (int64_t i = 0; i < n; i++) histogram[ordered(scores[i]) >> SHIFT]++;
  uint32_t bin = (1 << CHOICE_BITS) - 1;
  for (; histogram[bin] < k; bin--) k -= histogram[bin];
  candidates.clear();
  for (int64_t i = 0; i < n; i++)
    if (ordered(scores[i]) >> SHIFT == bin) candidates.push_back(scores[i]);
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
  return candidates[k - 1];
}

// Marks the k largest of n > k scores with 1, the others with 0; of equal scores at the limit the first.
void mark_best(const float* scores, int64_t n, int64_t k, uint8_t* marks, std::vector<float>& candidates) {
  const float least = find_kth(scores, n, k, candidates);
  int64_t num_above = 0;
  for (int64_t i = 0; i < n; i++) {
    marks[i] = scores[i] > least;
    num_above += marks[i];
  }
  for (int64_t i = 0, missing = k - num_above; missing > 0 && i < n; i++)
    if (scores[i] == least) marks[i] = 1, missing--;
}

}  // namespace

// Shapes are those of kernels/sparse_latent.py; dims are multiples of LANES.
extern "C" {

void quire_index_scores(int dtype, int cache_dtype, const void* q, const float* weights, const void* keys,
                        const float* scales, const int32_t* tables, const int64_t* rows, const int32_t* lens,
                        float* scores, int64_t num_tokens, int64_t num_heads, int64_t dim, int64_t block_size,
                        int64_t table_stride, int64_t q_stride, int64_t key_stride, int64_t width, int64_t top_k,
                        int threads) {
  const PagedRows cached{cache_dtype, keys, scales, key_stride, dim, block_size};
  const Indexer indexer{dtype,  q,          weights,   cached,       tables,   rows,  lens,
                        scores, num_tokens, num_heads, table_stride, q_stride, width, top_k};
  indexer.score(threads);
}

void quire_choose_tokens(const float* scores, const int32_t* lens, uint8_t* chosen, int64_t num_tokens, int64_t width,
                         int64_t top_k, int threads) {
  parallel_for(num_tokens, num_tokens * width < MIN_PARALLEL ? 1 : threads, [&](auto& next) {
    std::vector<float> candidates;
    for (int64_t t; (t = next()) < num_tokens;) {
      uint8_t* own = chosen + t * width;
      const int64_t length = lens[t];
      if (length <= top_k)
        memset(own, 1, length);
      else
        mark_best(scores + t * width, length, top_k, own, candidates);
      memset(own + length, 0, width - length);
    }
  });
}

// Writes the slots of the chosen tokens in order of position, at most top_k; those after them are of the first token.
void quire_chosen_slots(const uint8_t* chosen, const int32_t* tables, const int64_t* rows, int32_t* slots,
                        int32_t* counts, int64_t num_tokens, int64_t width, int64_t top_k, int64_t block_size,
                        int64_t table_stride, int threads) {
  parallel_for(num_tokens, num_tokens * width < MIN_PARALLEL ? 1 : threads, [&](auto& next) {
    for (int64_t t; (t = next()) < num_tokens;) {
      const int32_t* table = tables + rows[t] * table_stride;
      const uint8_t* marks = chosen + t * width;
      int32_t* own = slots + t * top_k;
      int64_t count = 0;
      for (int64_t position = 0; position < width && count < top_k; position++)
        if (marks[position]) own[count++] = int32_t(table[position / block_size] * block_size + position % block_size);
      std::fill(own + count, own + top_k, int32_t(table[0] * block_size));
      counts[t] = int32_t(count);
    }
  });
}
}
