// Attention over a paged KV cache [N, 2, Hkv, B, D] with an online softmax (Milakov and Gimelshein, 2018).
#include <type_traits>

#include "constants.h"
#include "decode_tasks.h"
#include "ops.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile_buffers.h"
#include "tile_products.h"

namespace {

// Tokens that share the keys that a task reads. More would leave fewer tasks to the threads.
constexpr int MAX_SHARING_TOKENS = 16;
// Keys times head_dim below which one thread is faster than several.
constexpr int64_t MIN_PARALLEL = 1 << 16;
// Vectors of keys that a decoding query attends to at a time.
constexpr int DECODE_VECTORS = 4;
// Queries times heads of a group that share each tile of keys: with 96, packing the keys takes 3 % more of the time.
constexpr int QUERY_ROWS = 192;
// Of these, rows whose scores stay in the first-level cache until they are weights.
constexpr int BAND_ROWS = 48;
static_assert(BAND_ROWS % TILE_ROWS == 0 && BAND_ROWS % LANES == 0);

// One KV head's keys and values of one sequence.
struct Cache {
  int dtype;
  const void* data;
  const float* scales;  // of a quantized cache: one per row
  const int32_t* table;
  int64_t num_kv_heads, block_size, head_dim, head;

  // The keys and values of another sequence or head.
  Cache of(const int32_t* sequence_table, int64_t kv_head) const {
    return {dtype, data, scales, sequence_table, num_kv_heads, block_size, head_dim, kv_head};
  }

  // Row index of the key (which = 0) or value (which = 1) of a position; the rest of its block follows.
  int64_t row(int64_t position, int which) const {
    const int64_t block = table[position / block_size];
    return ((block * 2 + which) * num_kv_heads + head) * block_size + position % block_size;
  }

  template <typename T>
  const T* rows(int64_t position, int which) const {
    return (const T*)data + row(position, which) * head_dim;
  }

  // Copies the keys or values of `n` positions of one block to `out` as float32.
  void read(int64_t position, int which, int64_t n, float* out) const {
    const float* own_scales = scales ? scales + row(position, which) : nullptr;
    switch (dtype) {
      case FLOAT32: return widen(rows<float>(position, which), head_dim, own_scales, n, head_dim, out);
      case BFLOAT16: return widen(rows<bf16>(position, which), head_dim, own_scales, n, head_dim, out);
      case FLOAT16: return widen(rows<f16>(position, which), head_dim, own_scales, n, head_dim, out);
      case INT8: return widen(rows<int8_t>(position, which), head_dim, own_scales, n, head_dim, out);
      case FLOAT8_E4M3FN: return widen(rows<fp8>(position, which), head_dim, own_scales, n, head_dim, out);
    }
  }

  // Returns the same rows in place if they are float32, otherwise copied to `scratch`.
  const float* floats(int64_t position, int which, int64_t n, float* scratch) const {
    if (dtype == FLOAT32) return rows<float>(position, which);
    read(position, which, n, scratch);
    return scratch;
  }

  // Returns LANES rows: `n` rows of the cache, then zeros.
  const float* vector_rows(int64_t position, int which, int64_t n, float* scratch) const {
    if (n == LANES) return floats(position, which, n, scratch);
    read(position, which, n, scratch);
    // The cache may hold anything after these rows, or end.
    std::fill(scratch + n * head_dim, scratch + LANES * head_dim, 0.f);
    return scratch;
  }

  // Returns the same rows as they are stored.
  const char* stored(int64_t position, int which) const {
    return (const char*)data + row(position, which) * head_dim * itemsize(dtype);
  }
};

// Blocks are scattered, so the hardware prefetcher cannot predict the next one. Inlining is forced: GCC removes the
// call otherwise, as one without effect.
inline __attribute__((always_inline)) void prefetch(const char* memory, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(memory + i, 0, 2);
}

// See kernels/attention_variant.py.
struct Variant {
  int64_t window, chunk;
  float soft_cap;
  const float* slopes;
  const float* sinks;

  // Changes no score and hides no key before the query's own.
  bool is_plain() const { return !hides_keys() && soft_cap == 0 && slopes == nullptr; }

  bool hides_keys() const { return window != 0 || chunk != 0; }

  // The first position that a query attends to.
  int64_t first_visible(int64_t position) const {
    const int64_t first = window ? std::max<int64_t>(0, position + 1 - window) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }

  // Soft cap and ALiBi of LANES scores. `distance` is key position minus query position of the first.
  Vec apply(Vec scores, int64_t head, int64_t distance) const {
    if (soft_cap != 0) scores = soft_cap * tanh_of(scores / soft_cap);
    if (slopes) scores += slopes[head] * __builtin_convertvector(lane_indices() + int32_t(distance), Vec);
    return scores;
  }
};

// The state of a query head before its first key: a sink is a key whose value is 0.
inline Softmax initial_state(const Variant& variant, int64_t head) {
  return variant.sinks ? Softmax{variant.sinks[head], 1.f} : Softmax{};
}

// Raises the running maximum to `top` if that is larger. Returns the factor for earlier weights.
inline float raise_max(Softmax& state, float top) {
  if (top <= state.max) return 1.f;
  const float decay = std::exp(state.max - top);
  state.max = top;
  state.sum *= decay;
  return decay;
}

// Up to DECODE_VECTORS times LANES adjacent keys, in vectors of one block each.
struct DecodeTile {
  int count = 0;  // vectors
  int64_t positions[DECODE_VECTORS];
  int lens[DECODE_VECTORS];  // keys of each vector; finite numbers follow
  // What the next tile will read, and how many bytes of each.
  const char *next_keys[DECODE_VECTORS], *next_values[DECODE_VECTORS];
  int64_t next_bytes[DECODE_VECTORS];

  // Lays out the first keys of `begin` to `end`. Returns the end of the tile.
  int64_t lay_out(const Cache& cache, int64_t begin, int64_t end) {
    int64_t at = begin;
    for (; count < DECODE_VECTORS && at < end; at += lens[count++]) {
      positions[count] = at;
      lens[count] = std::min<int64_t>({LANES, cache.block_size - at % cache.block_size, end - at});
    }
    for (int i = 0; i < count; i++) {
      const int64_t next = std::min(positions[i] + at - begin, end - 1);
      next_keys[i] = cache.stored(next, 0), next_values[i] = cache.stored(next, 1);
      next_bytes[i] = at < end ? lens[i] * cache.head_dim * itemsize(cache.dtype) : 0;
    }
    return at;
  }

  bool has_whole_vectors() const {
    return std::all_of(lens, lens + count, [](int len) { return len == LANES; });
  }
};

// Adds the keys and values of a tile, as far as they are among the first `len`, to the attention of one query. A tile
// has several vectors, so that the scores of one need not wait for the reductions and exponentials of another. The
// first query that reads a tile prefetches the next one bit by bit, since a processor has few reads under way.
template <int D, typename T>
inline void attend_tile(const float* q, const DecodeTile& tile, const T* const* keys, const T* const* values,
                        int64_t len, const Variant& variant, int64_t head, bool prefetches, Softmax& state,
                        float* acc) {
  constexpr int W = D / LANES;
  Vec query[W], weights[DECODE_VECTORS], top = broadcast(-INFINITY), sums = {};
  for (int w = 0; w < W; w++) query[w] = load(q + w * LANES);
  for (int i = 0; i < tile.count; i++) {
    if (prefetches) prefetch(tile.next_keys[i], tile.next_bytes[i]);
    Vec dots[LANES] = {};
    for (int t = 0; t < LANES; t++)
      for (int w = 0; w < W; w++) dots[t] += query[w] * load(keys[i] + t * D + w * LANES);
    Vec scores = variant.apply(sums_of(dots), head, tile.positions[i] + 1 - len);
    const int64_t visible = std::min<int64_t>(tile.lens[i], len - tile.positions[i]);
    if (visible < LANES) scores = lane_indices() < int32_t(visible) ? scores : broadcast(-INFINITY);
    top = scores > top ? scores : top;
    weights[i] = scores;
  }
  const float decay = raise_max(state, max_of(top));
  for (int i = 0; i < tile.count; i++) {
    weights[i] = exp_of(weights[i] - state.max);
    sums += weights[i];
  }
  state.sum += sum_of(sums);
  Vec out[W];
  for (int w = 0; w < W; w++) out[w] = load(acc + w * LANES) * decay;
  for (int i = 0; i < tile.count; i++) {
    if (prefetches) prefetch(tile.next_values[i], tile.next_bytes[i]);
    for (int t = 0; t < LANES; t++)
      for (int w = 0; w < W; w++) out[w] += weights[i][t] * load(values[i] + t * D + w * LANES);
  }
  for (int w = 0; w < W; w++) store(acc + w * LANES, out[w]);
}

// The query heads of one KV head, of a token that attends to the first `len` keys.
struct Query {
  const float* heads;  // [group, D]
  int64_t len;
  Softmax* states;  // [group]
  float* acc;       // [group, D]
};

// Adds keys `begin` to `end` of one KV head to the attention of the query heads of tokens that share them. The sums of
// a token do not depend on the others.
template <int D>
void attend(const Query* queries, int num_queries, int group, const Cache& cache, const Variant& variant, int64_t begin,
            int64_t end) {
  float scratch[2 * DECODE_VECTORS * LANES * D];
  for (int64_t at = begin; at < end;) {
    DecodeTile tile;
    at = tile.lay_out(cache, at, end);
    const auto attend_all = [&](const auto* const* keys, const auto* const* values) {
      for (int i = 0; i < num_queries; i++) {
        const Query& query = queries[i];
        if (query.len <= tile.positions[0]) continue;
        for (int g = 0; g < group; g++)
          attend_tile<D>(query.heads + g * D, tile, keys, values, query.len, variant, cache.head * group + g,
                         i + g == 0, query.states[g], query.acc + g * D);
      }
    };
    const auto attend_stored = [&](auto t) {
      const decltype(t) *keys[DECODE_VECTORS], *values[DECODE_VECTORS];
      for (int i = 0; i < tile.count; i++) {
        keys[i] = cache.rows<decltype(t)>(tile.positions[i], 0);
        values[i] = cache.rows<decltype(t)>(tile.positions[i], 1);
      }
      attend_all(keys, values);
    };
    // Rows that are read only once are not converted to float32 first: 1.3 times as fast.
    const bool is_read_once = num_queries * group == 1 && tile.has_whole_vectors();
    if (is_read_once && cache.dtype == BFLOAT16) {
      attend_stored(bf16{});
    } else if (is_read_once && cache.dtype == FLOAT16) {
      attend_stored(f16{});
    } else {
      const float *keys[DECODE_VECTORS], *values[DECODE_VECTORS];
      for (int i = 0; i < tile.count; i++) {
        float* copies = scratch + 2 * i * LANES * D;
        keys[i] = cache.vector_rows(tile.positions[i], 0, tile.lens[i], copies);
        values[i] = cache.vector_rows(tile.positions[i], 1, tile.lens[i], copies + LANES * D);
      }
      attend_all(keys, values);
    }
  }
}

// Merges one head's splits, `stride` apart, weighted by their softmax states (Dao et al., Flash-Decoding, 2023), and
// writes the output from element `to` on. The output of no splits is 0.
template <int D>
void merge(const Softmax* states, const float* acc, int64_t num_splits, int64_t stride, int dtype, void* out,
           int64_t to) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < num_splits; i++) top = std::max(top, states[i * stride].max);
  Vec total[D / LANES] = {};
  for (int64_t i = 0; i < num_splits; i++) {
    const Softmax& split = states[i * stride];
    const float weight = std::exp(split.max - top);
    sum += split.sum * weight;
    for (int w = 0; w < D / LANES; w++) total[w] += weight * load(acc + i * stride * D + w * LANES);
  }
  for (int w = 0; w < D / LANES; w++) store_as(dtype, out, to + w * LANES, total[w] / (num_splits ? sum : 1.f));
}

template <int D>
void decode(int dtype, const void* q, const Cache& pool, const int32_t* tables, const int32_t* lens, void* out,
            int64_t num_seqs, int64_t num_heads, int64_t table_stride, int64_t q_stride, float scale,
            const Variant& variant, int threads) {
  const int64_t num_kv_heads = pool.num_kv_heads;
  const int group = num_heads / num_kv_heads;
  const DecodeTokens tokens{num_seqs, tables, lens, table_stride, pool.block_size, MAX_SHARING_TOKENS};
  const std::vector<DecodeTask> tasks = tokens.tasks(variant, num_kv_heads);
  std::vector<int64_t> first(num_seqs), num_splits(num_seqs);  // parts of each token's heads, and splits per head
  int64_t num_keys = 0, num_parts = 0;
  for (int32_t s = 0; s < num_seqs; s++) {
    const int32_t start = variant.first_visible(lens[s] - 1);
    num_keys += lens[s] - start;
    num_splits[s] = (lens[s] + SPLIT_LEN - 1) / SPLIT_LEN - start / SPLIT_LEN;
    first[s] = num_parts;
    num_parts += num_splits[s] * num_kv_heads;
  }
  const int64_t num_tasks = tasks.size();
  if (num_keys * num_kv_heads * D < MIN_PARALLEL) threads = 1;
  std::vector<float> acc(num_parts * group * D);
  std::vector<Softmax> states(num_parts * group);
  parallel_for(num_tasks, threads, [&](auto& next) {
    std::vector<float> scaled;
    std::vector<Query> queries;
    for (int64_t i; (i = next()) < num_tasks;) {
      const DecodeTask& task = tasks[i];
      scaled.resize(task.count * group * D);
      queries.clear();
      for (int32_t s = task.first; s < task.first + task.count; s++) {
        const int64_t from = s * q_stride + int64_t(task.head) * group * D;
        float* heads = &scaled[queries.size() * group * D];
        for (int j = 0; j < group * D; j += LANES) store(heads + j, load_as(dtype, q, from + j) * scale);
        const int64_t part = (first[s] + task.head * num_splits[s] + task.split) * group;
        if (task.split == 0)
          for (int g = 0; g < group; g++) states[part + g] = initial_state(variant, task.head * group + g);
        queries.push_back({heads, lens[s], &states[part], &acc[part * D]});
      }
      const Cache cache = pool.of(tokens.table(task.longest), task.head);
      attend<D>(queries.data(), int(queries.size()), group, cache, variant, task.begin, task.end);
    }
  });
  if (num_seqs * num_heads * D < MIN_PARALLEL) threads = 1;
  parallel_for(num_seqs, threads, [&](auto& next) {
    for (int64_t s; (s = next()) < num_seqs;) {
      for (int64_t head = 0; head < num_heads; head++) {
        const int64_t begin = (first[s] + head / group * num_splits[s]) * group + head % group;
        merge<D>(&states[begin], &acc[begin * D], num_splits[s], group, dtype, out, (s * num_heads + head) * D);
      }
    }
  });
}

// Products of a strip of TILE_ROWS rows: c [TILE_ROWS, columns] = a [TILE_ROWS, depth] times b [depth, columns]; with
// `decay`, plus the earlier c, each row of which it multiplies. The strides of rows are constants, which is 7 % faster.
template <int A_STRIDE, int B_STRIDE, int C_STRIDE>
struct Strip {
  // Multiplies V vectors of columns.
  template <int V>
  static void multiply_tile(const float* a, const float* b, float* c, int64_t depth, const float* decay) {
    Vec acc[TILE_ROWS][V] = {};
    if (decay)
      for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(c + r * C_STRIDE + v * LANES) * decay[r];
    for (int64_t k = 0; k < depth; k++) {
      Vec row[V];
      for (int v = 0; v < V; v++) row[v] = load(b + k * B_STRIDE + v * LANES);
      for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < V; v++) acc[r][v] = multiply_add(a[r * A_STRIDE + k], row[v], acc[r][v]);
    }
    for (int r = 0; r < TILE_ROWS; r++)
      for (int v = 0; v < V; v++) store(c + r * C_STRIDE + v * LANES, acc[r][v]);
  }

  // `columns` is a multiple of LANES; up to V vectors of them are multiplied at a time.
  template <int V = TILE_VECTORS>
  static void multiply(const float* a, const float* b, float* c, int64_t depth, int64_t columns, const float* decay) {
    int64_t j = 0;
    for (; j + V * LANES <= columns; j += V * LANES) multiply_tile<V>(a, b + j, c + j, depth, decay);
    if constexpr (V > 1)
      if (j < columns) multiply<V / 2>(a, b + j, c + j, depth, columns - j, decay);
  }
};

// The keys that each token of a chunk may attend to, besides causality: a byte per key, 0 for hidden ones.
struct KeyMask {
  const uint8_t* bytes;  // null: all keys
  int64_t stride;

  KeyMask from(int64_t token) const { return {bytes ? bytes + token * stride : nullptr, stride}; }
};

// One thread's tile of queries: rows of one query head of one token each, from the first token's heads on. A strip of
// TILE_ROWS rows computes only the scores of keys that its last row attends to. A row's result does not depend on the
// other rows of the tile.
template <int D>
class QueryTile {
 public:
  // Rows are read in whole strips and in groups of LANES, so some follow the last one.
  explicit QueryTile(int64_t max_rows)
      : capacity_(max_rows + LANES + TILE_ROWS),
        queries_(capacity_ * D),
        scratch_(KEY_TILE * D),
        keys_(D * KEY_TILE),
        values_(KEY_TILE * D),
        scores_(BAND_ROWS * KEY_TILE),
        acc_(capacity_ * D),
        maxima_(capacity_),
        shifts_(capacity_),
        sums_(capacity_),
        decays_(capacity_),
        positions_(capacity_) {
#if defined(QUIRE_HAS_TILES)
    constexpr int64_t LINE = 64;
    halves_.resize(capacity_ * D + 2 * KEY_TILE * D + BAND_ROWS * KEY_TILE + LINE / sizeof(bf16));
    half_keys_ = (bf16*)(((uintptr_t)halves_.data() + LINE - 1) / LINE * LINE);
    half_values_ = half_keys_ + KEY_TILE * D;
    half_weights_ = half_values_ + KEY_TILE * D;
    half_queries_ = half_weights_ + BAND_ROWS * KEY_TILE;
#endif
  }

  // Multiplies in tile registers, if queries and cache are in bfloat16.
  void use_tiles(bool uses_tiles, float scale) {
    uses_tiles_ = uses_tiles, scale_ = scale;
#if defined(QUIRE_HAS_TILES)
    if (uses_tiles) registers_.resize(GROUP_TOKENS, TILE_INPUTS);
#endif
  }

  // Begins with the queries of `group` heads from `first_head` on, of tokens from `position` on.
  void begin(int64_t first_head, int64_t group, int64_t position, int64_t num_tokens, const Variant& variant) {
    first_head_ = first_head, group_ = group;
    num_rows_ = num_tokens * group;
    // The last rows are repeated, so that a strip's last row is one that attends to all of the strip's keys.
    for (int64_t row = 0; row < capacity_; row++) {
      const Softmax state = initial_state(variant, first_head + row % group);
      maxima_[row] = state.max, sums_[row] = state.sum;
      positions_[row] = int32_t(position + std::min(row, num_rows_ - 1) / group);
    }
    acc_.fill(0.f);
  }

  void set_query(int64_t row, int dtype, const void* q, int64_t from, float scale) {
    if (uses_tiles_) {
      memcpy(half_queries_ + row * D, (const bf16*)q + from, D * sizeof(bf16));
      return;
    }
    for (int d = 0; d < D; d += LANES) store(&queries_[row * D + d], load_as(dtype, q, from + d) * scale);
  }

  // Adds `count` keys from position `at` on. The first `num_hidden` of them, which no row attends to, are not read.
  // The first row of `mask` is that of the tile's first token.
  void attend(const Cache& cache, const Variant& variant, const KeyMask& mask, int64_t at, int64_t num_hidden,
              int64_t count) {
    if (uses_tiles_)
      load_half_kv(cache, at, num_hidden, count);
    else
      load_kv(cache, at, num_hidden, count);
    for (int64_t row = 0; row < num_rows_; row += BAND_ROWS)
      attend_band(row, std::min(row + BAND_ROWS, num_rows_), variant, mask, at, count);
  }

  void write(int64_t row, int dtype, void* out, int64_t to) {
    for (int d = 0; d < D; d += LANES) store_as(dtype, out, to + d, load(&acc_[row * D + d]) / sums_[row]);
  }

 private:
  static int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

  // The keys of `count` from position `at` on that the strip's last row attends to.
  int64_t num_strip_keys(int64_t first_row, int64_t at, int64_t count) {
    return std::min<int64_t>(count, positions_[first_row + TILE_ROWS - 1] + 1 - at);
  }

  float* scores_of(int64_t row) { return &scores_[row % BAND_ROWS * KEY_TILE]; }

  // Adds the keys that are loaded to rows `begin` to `end`.
  void attend_band(int64_t begin, int64_t end, const Variant& variant, const KeyMask& mask, int64_t at, int64_t count) {
    (this->*(uses_tiles_ ? &QueryTile::score_tiles : &QueryTile::score_strips))(begin, end, at, count);
    if (!variant.is_plain())
      for (int64_t row = begin; row < end; row++) apply_variant(row, variant, at);
    if (mask.bytes)
      for (int64_t row = begin; row < end; row++) hide(row, mask.bytes + row / group_ * mask.stride + at, count);
    const bool can_be_whole = variant.is_plain() && !mask.bytes && count == KEY_TILE;
    for_row_groups(begin, end, at, count, can_be_whole, [&](auto is_masked, int64_t row, int64_t num_keys) {
      raise_maxima<is_masked()>(row, at, num_keys);
    });
    for_row_groups(begin, end, at, count, can_be_whole, [&](auto is_masked, int64_t row, int64_t num_keys) {
      weigh<is_masked()>(row, num_keys);
    });
    (this->*(uses_tiles_ ? &QueryTile::add_value_tiles : &QueryTile::add_value_strips))(begin, end, at, count);
  }

  // The scores of rows `begin` to `end`, of `count` keys from position `at` on.
  void score_strips(int64_t begin, int64_t end, int64_t at, int64_t count) {
    for (int64_t row = begin; row < end; row += TILE_ROWS)
      if (const int64_t num_keys = num_strip_keys(row, at, count); num_keys > 0)
        Strip<D, KEY_TILE, KEY_TILE>::multiply(&queries_[row * D], keys_.data(), scores_of(row), D,
                                               whole_vectors(num_keys), nullptr);
  }

  // Adds the weighted values of the same keys.
  void add_value_strips(int64_t begin, int64_t end, int64_t at, int64_t count) {
    for (int64_t row = begin; row < end; row += TILE_ROWS)
      if (const int64_t num_keys = num_strip_keys(row, at, count); num_keys > 0)
        Strip<KEY_TILE, D, D>::multiply(scores_of(row), values_.data(), &acc_[row * D], num_keys, D, &decays_[row]);
  }

  // Loads keys as columns and values as rows; those that are not read have a weight of 0.
  void load_kv(const Cache& cache, int64_t begin, int64_t num_hidden, int64_t count) {
    std::fill_n(values_.data(), num_hidden * D, 0.f);
    for (int64_t t = num_hidden; t < count;) {
      const int64_t n = std::min(cache.block_size - (begin + t) % cache.block_size, count - t);
      transpose_rows(cache.floats(begin + t, 0, n, scratch_.data()), n, D, &keys_[t]);
      cache.read(begin + t, 1, n, &values_[t * D]);
      t += n;
    }
  }

#if defined(QUIRE_HAS_TILES)
  // Loads keys as columns of pairs of their numbers, and pairs of values as rows.
  void load_half_kv(const Cache& cache, int64_t begin, int64_t num_hidden, int64_t count) {
    memset((void*)half_values_, 0, KEY_TILE * D * sizeof(bf16));
    for (int64_t t = num_hidden; t < count;) {
      const int64_t n = std::min(cache.block_size - (begin + t) % cache.block_size, count - t);
      // A pair of numbers is moved as a float32 is.
      transpose_rows((const float*)cache.rows<bf16>(begin + t, 0), n, D / 2, (float*)half_keys_ + t);
      const bf16* values = cache.rows<bf16>(begin + t, 1);
      for (int64_t i = 0; i < n; i++) {
        uint32_t* pairs = (uint32_t*)half_values_ + (t + i) / 2 * D;
        const int shift = (t + i) % 2 * 16;
        for (int d = 0; d < D; d += LANES) {
          HalfVec half;
          BitVec bits;
          memcpy(&half, values + i * D + d, sizeof half);
          memcpy(&bits, pairs + d, sizeof bits);
          bits |= __builtin_convertvector(half, BitVec) << shift;
          memcpy(pairs + d, &bits, sizeof bits);
        }
      }
      t += n;
    }
  }

  // The keys that some of LANES rows attend to, as for_row_groups has it.
  int64_t num_group_keys(int64_t row, int64_t at, int64_t count) {
    return num_strip_keys((row + LANES - 1) / TILE_ROWS * TILE_ROWS, at, count);
  }

  void score_tiles(int64_t begin, int64_t end, int64_t at, int64_t count) {
    constexpr int64_t STRIDE = KEY_TILE * sizeof(float);
    for (int64_t row = begin; row < end; row += TILE_TOKENS) {
      if (num_group_keys(row, at, count) <= 0) continue;
      float* scores = scores_of(row);
      add_row_of_tiles<false, KEY_TILE / TILE_OUTPUTS, 0>(half_queries_ + row * D, D, half_keys_, STRIDE, D / TILE_INPUTS,
                                                          scores, STRIDE);
      for (int64_t i = 0; i < TILE_TOKENS * KEY_TILE; i += LANES) store(scores + i, load(scores + i) * scale_);
    }
  }

  void add_value_tiles(int64_t begin, int64_t end, int64_t at, int64_t count) {
    constexpr int64_t STRIDE = D * sizeof(float);
    for (int64_t row = begin; row < end; row += TILE_TOKENS) {
      const int64_t num_keys = num_group_keys(row, at, count);
      if (num_keys <= 0) continue;
      float* acc = &acc_[row * D];
      const float* weights = scores_of(row);
      bf16* halves = half_weights_ + row % BAND_ROWS * KEY_TILE;
      const int64_t num_columns = whole_vectors(num_keys);
      for (int r = 0; r < TILE_TOKENS; r++) {
        for (int64_t i = 0; i < KEY_TILE; i += LANES)
          store(halves + r * KEY_TILE + i, i < num_columns ? load(weights + r * KEY_TILE + i) : Vec{});
        if (const float decay = decays_[row + r]; decay != 1.f)
          for (int d = 0; d < D; d += LANES) store(acc + r * D + d, load(acc + r * D + d) * decay);
      }
      int d = 0;
      for (; d + 64 <= D; d += 64)
        add_row_of_tiles<true, 4, 0>(halves, KEY_TILE, half_values_ + 2 * d, STRIDE, KEY_TILE / TILE_INPUTS, acc + d, STRIDE);
      if (d < D)
        add_row_of_tiles<true, 2, 0>(halves, KEY_TILE, half_values_ + 2 * d, STRIDE, KEY_TILE / TILE_INPUTS, acc + d, STRIDE);
    }
  }
#else
  void load_half_kv(const Cache&, int64_t, int64_t, int64_t) {}
  void score_tiles(int64_t, int64_t, int64_t, int64_t) {}
  void add_value_tiles(int64_t, int64_t, int64_t, int64_t) {}
#endif

  // Applies the variant to one row of scores; the tile's first key is at `start`.
  void apply_variant(int64_t row, const Variant& variant, int64_t start) {
    const int64_t position = positions_[row], distance = start - position;
    const int hidden = std::max<int64_t>(0, variant.first_visible(position) - start);
    for (int i = 0; i < KEY_TILE; i += LANES) {
      float* s = scores_of(row) + i;
      const Vec applied = variant.apply(load(s), first_head_ + row % group_, distance + i);
      store(s, lane_indices() < hidden - i ? broadcast(-INFINITY) : applied);
    }
  }

  // Hides those of `count` keys from a row whose byte is 0.
  void hide(int64_t row, const uint8_t* visible, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
      UnsignedByteVec bytes{};
      if (i + LANES <= count)
        memcpy(&bytes, visible + i, LANES);
      else
        memcpy(&bytes, visible + i, count - i);
      const BitVec wide = __builtin_convertvector(__builtin_convertvector(bytes, HalfVec), BitVec);
      float* s = scores_of(row) + i;
      store(s, wide != 0 ? load(s) : broadcast(-INFINITY));
    }
  }

  // Calls body(is_masked, row, num_keys) for each LANES rows that attend to some of `count` keys from position `at` on,
  // with the number of these keys; is_masked() is false if all rows attend to a whole tile.
  template <typename Body>
  void for_row_groups(int64_t begin, int64_t end, int64_t at, int64_t count, bool can_be_whole, const Body& body) {
    for (int64_t row = begin; row < end; row += LANES) {
      const int64_t num_keys = num_strip_keys((row + LANES - 1) / TILE_ROWS * TILE_ROWS, at, count);
      if (can_be_whole && positions_[row] >= at + KEY_TILE - 1)
        body(std::false_type{}, row, KEY_TILE);
      else if (num_keys > 0)
        body(std::true_type{}, row, num_keys);
    }
  }

  // Raises the maxima of LANES rows from `first` on by their scores of `num_keys` keys from position `at` on; with
  // IS_MASKED, hides keys after each row's own. The rows are folded together, since each reduction of one row waits for
  // itself; and the weights follow when other rows' maxima are known, since they would wait for this reduction.
  template <bool IS_MASKED>
  void raise_maxima(int64_t first, int64_t at, int64_t num_keys) {
    const int num_vectors = IS_MASKED ? int(whole_vectors(num_keys) / LANES) : KEY_TILE / LANES;
    float* scores = scores_of(first);
    Vec tops[LANES];
    for (int r = 0; r < LANES; r++, scores += KEY_TILE) {
      tops[r] = broadcast(-INFINITY);
      const int visible = int(std::min<int64_t>(num_keys, positions_[first + r] + 1 - at));
      for (int i = 0; i < num_vectors; i++) {
        Vec s = load(scores + i * LANES);
        if (IS_MASKED) {
          s = lane_indices() + i * LANES < visible ? s : broadcast(-INFINITY);
          store(scores + i * LANES, s);
        }
        tops[r] = larger(s, tops[r]);
      }
    }
    const Vec before = load(&maxima_[first]), now = larger(maxima_of(tops), before);
    // Rows without any key so far have no maximum; their weights are 0.
    const Vec shift = now == -INFINITY ? Vec{} : now;
    store(&maxima_[first], now);
    store(&shifts_[first], shift);
    store(&decays_[first], exp_of_negative(before - shift));
  }

  // Replaces the scores of LANES rows from `first` on by softmax weights.
  template <bool IS_MASKED>
  void weigh(int64_t first, int64_t num_keys) {
    const int num_vectors = IS_MASKED ? int(whole_vectors(num_keys) / LANES) : KEY_TILE / LANES;
    float *scores = scores_of(first), *shifts = &shifts_[first];
    Vec weight_sums[LANES];
    for (int r = 0; r < LANES; r++, scores += KEY_TILE) {
      Vec sum = {};
      for (int i = 0; i < num_vectors; i++) {
        const Vec s = load(scores + i * LANES);
        Vec weights = exp_of_negative(s - shifts[r]);
        if (IS_MASKED) weights = s == -INFINITY ? Vec{} : weights;
        store(scores + i * LANES, weights);
        sum += weights;
      }
      weight_sums[r] = sum;
    }
    store(&sums_[first], load(&sums_[first]) * load(&decays_[first]) + sums_of(weight_sums));
  }

  int64_t capacity_, num_rows_ = 0, first_head_ = 0, group_ = 1;
  Floats queries_, scratch_, keys_, values_, scores_, acc_;
  // Of each row's softmax. shifts_ are the maxima, 0 if there is none; decays_ multiply acc_ at the next product.
  Floats maxima_, shifts_, sums_, decays_;
  std::vector<int32_t> positions_;
  bool uses_tiles_ = false;
  float scale_ = 1.f;
  // In bfloat16 for tiles: keys [D / 2, KEY_TILE, 2], values [KEY_TILE / 2, D, 2], weights of a band, and queries.
  bf16 *half_keys_ = nullptr, *half_values_ = nullptr, *half_weights_ = nullptr, *half_queries_ = nullptr;
#if defined(QUIRE_HAS_TILES)
  std::vector<bf16> halves_;
  TileRegisters registers_;
#endif
};

// Dimensions of heads that tile registers multiply.
#if defined(QUIRE_HAS_TILES)
template <int D>
constexpr bool USES_TILES = D % TILE_INPUTS == 0 && LANES == TILE_TOKENS;
#else
template <int D>
constexpr bool USES_TILES = false;
#endif

struct PrefillTask {
  int32_t sequence, head, begin, end;  // queries, relative to the chunk's first
};

// Tasks of one head are adjacent, the longest ones first: threads that end with short tasks end at about the same time.
std::vector<PrefillTask> prefill_tasks(const int32_t* query_start, int64_t num_seqs, int64_t num_kv_heads,
                                       int32_t tile_len) {
  std::vector<PrefillTask> tasks;
  for (int32_t s = 0; s < num_seqs; s++) {
    const int32_t chunk_len = query_start[s + 1] - query_start[s];
    for (int32_t h = 0; h < num_kv_heads; h++)
      for (int32_t end = chunk_len; end > 0; end -= tile_len) tasks.push_back({s, h, std::max(end - tile_len, 0), end});
  }
  return tasks;
}

template <int D>
void prefill(int dtype, const void* q, const Cache& pool, const int32_t* tables, const int32_t* query_start,
             const int32_t* lens, void* out, int64_t num_seqs, int64_t num_heads, int64_t table_stride,
             int64_t q_stride, float scale, const Variant& variant, const KeyMask& mask, int threads) {
  const int64_t group = num_heads / pool.num_kv_heads;
  const int32_t tile_len = std::max<int64_t>(1, QUERY_ROWS / group);
  const auto tasks = prefill_tasks(query_start, num_seqs, pool.num_kv_heads, tile_len);
  int32_t max_len = 0;
  for (const PrefillTask& task : tasks) max_len = std::max(max_len, task.end - task.begin);
  parallel_for(int64_t(tasks.size()), threads, [&](auto& next) {
    QueryTile<D> tile(max_len * group);
    tile.use_tiles(USES_TILES<D> && dtype == BFLOAT16 && pool.dtype == BFLOAT16, scale);
    for (size_t i; (i = next()) < tasks.size();) {
      const PrefillTask& task = tasks[i];
      const int64_t start = query_start[task.sequence], first_head = task.head * group;
      const int64_t before = lens[task.sequence] - (query_start[task.sequence + 1] - start);
      const int64_t rows = (task.end - task.begin) * group;
      const Cache cache = pool.of(tables + task.sequence * table_stride, task.head);
      tile.begin(first_head, group, before + task.begin, task.end - task.begin, variant);
      for (int64_t row = 0; row < rows; row++) {
        const int64_t token = start + task.begin + row / group;
        tile.set_query(row, dtype, q, token * q_stride + (first_head + row % group) * D, scale);
      }
      // Tiles begin at multiples of their length, so that a token's sum does not depend on the tokens beside it.
      const int64_t first_key = variant.first_visible(before + task.begin), end = before + task.end;
      for (int64_t at = first_key / KEY_TILE * KEY_TILE; at < end; at += KEY_TILE)
        tile.attend(cache, variant, mask.from(start + task.begin), at, std::max<int64_t>(0, first_key - at),
                    std::min<int64_t>(KEY_TILE, end - at));
      for (int64_t row = 0; row < rows; row++) {
        const int64_t token = start + task.begin + row / group;
        tile.write(row, dtype, out, (token * num_heads + first_head + row % group) * D);
      }
    }
  });
}

}  // namespace

// Shapes are those of kernels/paged_attention.py. `dtype` is that of q and out; scales, slopes and sinks may be null. The
// ops return 1, and compute nothing, for a head_dim that is not in FOR_EACH_HEAD_DIM.
extern "C" {

int quire_paged_decode(int dtype, int cache_dtype, const void* q, const void* kv, const float* scales,
                       const int32_t* tables, const int32_t* lens, void* out, int64_t num_seqs, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t table_stride,
                       int64_t q_stride, float scale, int64_t window, int64_t chunk, float soft_cap,
                       const float* slopes, const float* sinks, int threads) {
  const Variant variant{window, chunk, soft_cap, slopes, sinks};
  const Cache pool{cache_dtype, kv, scales, nullptr, num_kv_heads, block_size, head_dim, 0};
#define DECODE(D)                                                                                             \
  case D:                                                                                                     \
    decode<D>(dtype, q, pool, tables, lens, out, num_seqs, num_heads, table_stride, q_stride, scale, variant, \
              threads);                                                                                       \
    return 0;
  switch (head_dim) {
    FOR_EACH_HEAD_DIM(DECODE)
    default: return 1;
  }
}

// `mask` may be null; its rows, of one byte per key, are mask_stride bytes apart.
int quire_paged_prefill(int dtype, int cache_dtype, const void* q, const void* kv, const float* scales,
                        const int32_t* tables, const int32_t* query_start, const int32_t* lens, void* out,
                        int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t block_size, int64_t table_stride, int64_t q_stride, float scale, int64_t window,
                        int64_t chunk, float soft_cap, const float* slopes, const float* sinks, const uint8_t* mask,
                        int64_t mask_stride, int threads) {
  const Variant variant{window, chunk, soft_cap, slopes, sinks};
  const Cache pool{cache_dtype, kv, scales, nullptr, num_kv_heads, block_size, head_dim, 0};
#define PREFILL(D)                                                                                                 \
  case D:                                                                                                          \
    prefill<D>(dtype, q, pool, tables, query_start, lens, out, num_seqs, num_heads, table_stride, q_stride, scale, \
               variant, {mask, mask_stride}, threads);                                                                                  \
    return 0;
  switch (head_dim) {
    FOR_EACH_HEAD_DIM(PREFILL)
    default: return 1;
  }
}
}
