// The tasks of a decode step: splits of the keys, each for adjacent tokens that share them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// A sequence's keys are split at multiples of this in every batch, so that the sums do not depend on the batch.
constexpr int SPLIT_LEN = 256;

// Keys `begin` to `end` of one KV head, for adjacent tokens that share them: drafted tokens, which follow the newest of
// their sequence, and sequences with the same prefix.
struct DecodeTask {
  int32_t first, count;  // tokens
  int32_t longest;       // the token among them whose table has all of the keys
  int32_t head, split, begin, end;
};

// The tokens of a decode step, each with the block table and the number of keys of its own.
struct DecodeTokens {
  int64_t count;
  const int32_t* tables;
  const int32_t* lens;
  int64_t table_stride, block_size;
  int max_sharing;  // tokens of a task at most

  const int32_t* table(int32_t token) const { return tables + token * table_stride; }

  // Adds the tokens after those of a task that have the same blocks there.
  void add_sharing(DecodeTask& task) const {
    const int32_t split_end = task.begin + SPLIT_LEN, first_block = task.begin / block_size;
    for (int32_t next = task.first + 1; next < count && task.count < max_sharing; next++, task.count++) {
      if (lens[next] <= task.begin) return;
      const int32_t end = std::min(lens[next], split_end);
      const int32_t last_block = (std::min(end, task.end) - 1) / block_size;
      if (!std::equal(table(next) + first_block, table(next) + last_block + 1, table(task.longest) + first_block))
        return;
      if (end > task.end) task.longest = next, task.end = end;
    }
  }

  // Returns the tasks of one split of the keys after another, for each KV head.
  template <typename Variant>
  std::vector<DecodeTask> tasks(const Variant& variant, int64_t num_kv_heads) const {
    std::vector<DecodeTask> all;
    const int32_t longest = count ? *std::max_element(lens, lens + count) : 0;
    for (int32_t split_begin = 0; split_begin < longest; split_begin += SPLIT_LEN)
      for (int32_t token = 0, step; token < count; token += step) {
        step = 1;
        const int32_t start = variant.first_visible(lens[token] - 1);
        const int32_t begin = std::max(start, split_begin), end = std::min(lens[token], split_begin + SPLIT_LEN);
        if (begin >= end) continue;
        DecodeTask task{token, 1, token, 0, split_begin / SPLIT_LEN - start / SPLIT_LEN, begin, end};
        if (!variant.hides_keys()) add_sharing(task);
        step = task.count;
        for (; task.head < num_kv_heads; task.head++) all.push_back(task);
      }
    return all;
  }
};
