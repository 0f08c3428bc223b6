// Absorbed attention over a paged cache of latents (kernels/latent_attention.py): all heads of a token share its keys,
// whose first numbers are its value. A tile's queries are the heads of tokens that share the keys of a split.
#include "decode_tasks.h"
#include "thread_pool.h"
#include "tiles.h"

namespace {

// Heads of a tile at most, those of all of its tokens together.
constexpr int64_t MAX_ROWS = 96;
constexpr int MAX_SHARING_TOKENS = 16;
// Keys times their numbers below which one thread is faster than several.
constexpr int64_t MIN_PARALLEL = 1 << 16;

// All keys up to the query's own are visible.
struct Causal {
  int32_t first_visible(int32_t) const { return 0; }
  bool hides_keys() const { return false; }
};

// The attention of each token and head to each split of its keys.
struct Splits {
  int64_t num_heads, value_dim;
  std::vector<int64_t> first;  // split of each token; then their number
  std::vector<Softmax> states;
  std::vector<float> acc;

  Splits(const int32_t* lens, int64_t num_tokens, int64_t heads, int64_t value_len)
      : num_heads(heads), value_dim(value_len), first(num_tokens + 1) {
    for (int64_t t = 0; t < num_tokens; t++) first[t + 1] = first[t] + (lens[t] + SPLIT_LEN - 1) / SPLIT_LEN;
    states.resize(first.back() * num_heads);
    acc.resize(first.back() * num_heads * value_dim);
  }

  // Merges the splits of a token, weighted by their softmax states (Dao et al., Flash-Decoding, 2023). The output of no
  // splits is 0.
  void merge(int64_t token, int dtype, void* out) const {
    const int64_t begin = first[token], count = first[token + 1] - begin;
    std::vector<float> weights(count);
    for (int64_t head = 0; head < num_heads; head++) {
      const auto part = [&](int64_t split) { return (begin + split) * num_heads + head; };
      float top = -INFINITY, sum = 0;
      for (int64_t i = 0; i < count; i++) top = std::max(top, states[part(i)].max);
      for (int64_t i = 0; i < count; i++) {
        weights[i] = std::exp(states[part(i)].max - top);
        sum += states[part(i)].sum * weights[i];
      }
      for (int64_t d = 0; d < value_dim; d += LANES) {
        Vec total{};
        for (int64_t i = 0; i < count; i++) total += weights[i] * load(&acc[part(i) * value_dim + d]);
        store_as(dtype, out, (token * num_heads + head) * value_dim + d, total / (count ? sum : 1.f));
      }
    }
  }
};

struct LatentDecode {
  int dtype;
  const void* q;
  PagedRows latents;
  DecodeTokens tokens;
  int64_t num_heads, part_heads, q_stride;  // heads of a task
  float scale;

  // Computes the attention of a task's tokens and heads to its split of the keys.
  void attend(const DecodeTask& task, Tile& tile, float* rows, Splits& splits) const {
    const int64_t dim = latents.dim, first_head = task.head * part_heads;
    const int64_t heads = std::min(part_heads, num_heads - first_head), count = task.count * heads;
    const auto token_of = [&](int64_t row) { return task.first + row / heads; };
    tile.reset([](int64_t) { return Softmax{}; });
    for (int64_t row = 0; row < count; row++) {
      const int64_t from = token_of(row) * q_stride + (first_head + row % heads) * dim;
      for (int64_t d = 0; d < dim; d += LANES)
        store(&tile.queries[row * dim + d], load_as(dtype, q, from + d) * scale);
    }
    const int64_t num_rows = padded_rows(count);
    for (int64_t at = task.begin; at < task.end; at += KEY_TILE) {
      const int64_t num_keys = std::min<int64_t>(KEY_TILE, task.end - at);
      latents.read(tokens.table(task.longest), at, num_keys, rows);
      transpose_rows(rows, num_keys, dim, tile.keys.data());
      tile.score(num_rows, num_keys);
      for (int64_t row = 0; row < num_rows; row += LANES) {
        IntVec visible;
        bool is_masked = num_keys < padded_columns(num_keys);
        for (int r = 0; r < LANES; r++) {
          const int64_t len = row + r < count ? tokens.lens[token_of(row + r)] - at : 0;
          visible[r] = int32_t(std::clamp<int64_t>(len, 0, num_keys));
          is_masked |= visible[r] < num_keys;
        }
        tile.softmax(row, std::min<int64_t>(LANES, num_rows - row), num_keys, visible, is_masked);
      }
      tile.add_values(rows, dim, num_rows, num_keys);
    }
    for (int64_t row = 0; row < count; row++) {
      const int64_t part = (splits.first[token_of(row)] + task.split) * num_heads + first_head + row % heads;
      splits.states[part] = {tile.maxima[row], tile.sums[row]};
      std::copy_n(&tile.acc[row * tile.value_dim], tile.value_dim, &splits.acc[part * tile.value_dim]);
    }
  }
};

}  // namespace

// q is [S, Hq, D], out [S, Hq, C]; D and C are multiples of LANES. The rows of the cache are row_stride numbers apart.
extern "C" void quire_latent_decode(int dtype, int cache_dtype, const void* q, const void* latents, const float* scales,
                                    const int32_t* tables, const int32_t* lens, void* out, int64_t num_seqs,
                                    int64_t num_heads, int64_t dim, int64_t value_dim, int64_t row_stride,
                                    int64_t block_size, int64_t table_stride, int64_t q_stride, float scale,
                                    int threads) {
  const int64_t num_parts = (num_heads + MAX_ROWS - 1) / MAX_ROWS, part_heads = (num_heads + num_parts - 1) / num_parts;
  const int max_sharing = int(std::clamp<int64_t>(MAX_ROWS / part_heads, 1, MAX_SHARING_TOKENS));
  const LatentDecode decode{dtype,
                            q,
                            {cache_dtype, latents, scales, row_stride, dim, block_size},
                            {num_seqs, tables, lens, table_stride, block_size, max_sharing},
                            num_heads,
                            part_heads,
                            q_stride,
                            scale};
  const std::vector<DecodeTask> tasks = decode.tokens.tasks(Causal{}, num_parts);
  Splits splits(lens, num_seqs, num_heads, value_dim);
  if (splits.first.back() * SPLIT_LEN * dim < MIN_PARALLEL) threads = 1;
  parallel_for(int64_t(tasks.size()), threads, [&](auto& next) {
    Tile tile(max_sharing * part_heads, dim, value_dim);
    Floats rows(KEY_TILE * dim);
    for (size_t i; (i = next()) < tasks.size();) decode.attend(tasks[i], tile, rows.data(), splits);
  });
  parallel_for(num_seqs, threads, [&](auto& next) {
    for (int64_t token; (token = next()) < num_seqs;) splits.merge(token, dtype, out);
  });
}
