// Attention over a paged KV cache [N, 2, Hkv, B, D] with an online softmax (Milakov and Gimelshein, 2018).
#include "ops.h"
#include "team.h"

namespace {

// A sequence's keys are cut at multiples of this, whatever else is in the batch: the same sums in any batch.
constexpr int SPLIT = 256;
// Keys times head_dim below which one thread is done before two have met.
constexpr int64_t MIN_PARALLEL = 1 << 16;
constexpr int KEY_TILE = 64;
constexpr int TILE_ROWS = 6;     // rows and vectors of a product that stay in registers
constexpr int TILE_VECTORS = LANES == 8 ? 2 : 4;  // AVX2 has 16 registers, the others 32
constexpr int QUERY_ROWS = 96;   // queries times heads of a group that share each tile of keys

enum Number { FLOAT = 0, BF16 = 1, INT8 = 2, FP8 = 3 };

// Queries and outputs are of a type known at run time: they are few beside the keys.
inline Vec load_as(int type, const void* numbers, int64_t i) {
  return type == BF16 ? load((const bf16*)numbers + i) : load((const float*)numbers + i);
}

inline void store_as(int type, void* numbers, int64_t i, Vec v) {
  type == BF16 ? store((bf16*)numbers + i, v) : store((float*)numbers + i, v);
}

// Rows as floats, multiplied by their scales if they have some.
template <typename T>
void widen(const T* rows, const float* scales, int64_t n, int64_t length, float* out) {
  for (int64_t i = 0; i < n; i++) {
    const float scale = scales ? scales[i] : 1.f;
    for (int64_t d = i * length; d < (i + 1) * length; d += LANES) store(out + d, load(rows + d) * scale);
  }
}

// One KV head's keys and values of one sequence.
struct Cache {
  int type;
  const void* data;
  const float* scales;  // of a quantised cache: one a row
  const int32_t* table;
  int64_t num_kv_heads, block_size, head_dim, head;

  // Those of another sequence or head.
  Cache of(const int32_t* sequence_table, int64_t kv_head) const {
    return {type, data, scales, sequence_table, num_kv_heads, block_size, head_dim, kv_head};
  }

  // Where the key (which = 0) or value (1) of a position is; those of the rest of its block follow.
  int64_t row(int64_t position, int which) const {
    const int64_t block = table[position / block_size];
    return ((block * 2 + which) * num_kv_heads + head) * block_size + position % block_size;
  }

  template <typename T>
  const T* rows(int64_t position, int which) const {
    return (const T*)data + row(position, which) * head_dim;
  }

  // Those of `n` positions of one block, as floats.
  void read(int64_t position, int which, int64_t n, float* out) const {
    const float* own_scales = scales ? scales + row(position, which) : nullptr;
    switch (type) {
      case FLOAT: return widen(rows<float>(position, which), own_scales, n, head_dim, out);
      case BF16: return widen(rows<bf16>(position, which), own_scales, n, head_dim, out);
      case INT8: return widen(rows<int8_t>(position, which), own_scales, n, head_dim, out);
      case FP8: return widen(rows<fp8>(position, which), own_scales, n, head_dim, out);
    }
  }

  // The same where they lie, if they are floats, otherwise in `scratch`.
  const float* floats(int64_t position, int which, int64_t n, float* scratch) const {
    if (type == FLOAT) return rows<float>(position, which);
    read(position, which, n, scratch);
    return scratch;
  }

  // The same of LANES positions, of which `n` count.
  const float* lanes(int64_t position, int which, int64_t n, float* scratch) const {
    if (n == LANES) return floats(position, which, n, scratch);
    read(position, which, n, scratch);
    // What follows in the cache may be anything, or the end of the memory.
    std::fill(scratch + n * head_dim, scratch + LANES * head_dim, 0.f);
    return scratch;
  }

  // Blocks lie anywhere, so the processor cannot guess where the next one is. Not inlined, it would count as a call
  // without effect, and GCC would leave it out.
  inline __attribute__((always_inline)) void prefetch(int64_t position, int which, int64_t n) const {
    const int64_t width = type == FLOAT ? 4 : type == BF16 ? 2 : 1;
    const char* rows = (const char*)data + row(position, which) * head_dim * width;
    for (int64_t i = 0; i < n * head_dim * width; i += 64) __builtin_prefetch(rows + i, 0, 2);
  }
};

// See kernels/attention_variant.py.
struct Variant {
  int64_t window;
  float soft_cap;
  const float* slopes;

  bool is_plain() const { return window == 0 && soft_cap == 0 && slopes == nullptr; }

  // The first position that a query sees.
  int64_t first_seen(int64_t position) const { return window ? std::max<int64_t>(0, position + 1 - window) : 0; }

  // Scores of LANES keys, of which the first lies `distance` from the query: less than 0 before it.
  Vec apply(Vec scores, int64_t head, int64_t distance) const {
    if (soft_cap != 0) scores = soft_cap * tanh_of(scores / soft_cap);
    if (slopes) scores += slopes[head] * __builtin_convertvector(lane_numbers() + int32_t(distance), Vec);
    return scores;
  }
};

struct Softmax {
  float max = -INFINITY, sum = 0;
};

// Makes room for scores up to `top`: by what earlier weights shrink.
inline float raise(Softmax& state, float top) {
  if (top <= state.max) return 1.f;
  const float shrink = std::exp(state.max - top);
  state.max = top;
  state.sum *= shrink;
  return shrink;
}

// Adds LANES keys and values, of which `n` count, to one query; the first lies `distance` from it.
template <int D, typename T>
inline void attend_to(const float* q, const T* keys, const T* values, int n, const Variant& variant, int64_t head,
                      int64_t distance, Softmax& state, float* acc) {
  constexpr int W = D / LANES;
  Vec query[W], dots[LANES] = {};
  for (int w = 0; w < W; w++) query[w] = load(q + w * LANES);
  for (int t = 0; t < LANES; t++)
    for (int w = 0; w < W; w++) dots[t] += query[w] * load(keys + t * D + w * LANES);
  Vec scores = variant.apply(sums_of(dots), head, distance);
  if (n < LANES) scores = lane_numbers() < n ? scores : broadcast(-INFINITY);
  const float shrink = raise(state, max_of(scores));
  const Vec weights = exp_of(scores - state.max);
  state.sum += sum_of(weights);
  Vec out[W];
  for (int w = 0; w < W; w++) out[w] = load(acc + w * LANES) * shrink;
  for (int t = 0; t < LANES; t++)
    for (int w = 0; w < W; w++) out[w] += weights[t] * load(values + t * D + w * LANES);
  for (int w = 0; w < W; w++) store(acc + w * LANES, out[w]);
}

// Adds keys begin..end to one KV head's group of queries, which belong to the token at `position`.
template <int D>
void attend(const float* q, int group, int64_t position, const Cache& cache, const Variant& variant, int64_t begin,
            int64_t end, Softmax* states, float* acc) {
  float scratch[2 * LANES * D];
  for (int64_t at = begin; at < end;) {
    const int n = std::min<int64_t>({LANES, cache.block_size - at % cache.block_size, end - at});
    if (at + n < end) {
      cache.prefetch(at + n, 0, n);
      cache.prefetch(at + n, 1, n);
    }
    if (cache.type == BF16 && group == 1 && n == LANES) {
      // What is read once need not be made floats first: 1.3 times as fast.
      const bf16 *keys = cache.rows<bf16>(at, 0), *values = cache.rows<bf16>(at, 1);
      attend_to<D>(q, keys, values, n, variant, cache.head, at - position, *states, acc);
    } else {
      const float *keys = cache.lanes(at, 0, n, scratch), *values = cache.lanes(at, 1, n, scratch + LANES * D);
      for (int g = 0; g < group; g++)
        attend_to<D>(q + g * D, keys, values, n, variant, cache.head * group + g, at - position, states[g],
                     acc + g * D);
    }
    at += n;
  }
}

// One head's output from its parts, `stride` apart: softmaxes of the parts weigh by their maxima (Dao et al.,
// Flash-Decoding, 2023). Without parts it is 0. It is written from number `to` on.
template <int D>
void merge(const Softmax* states, const float* acc, int64_t splits, int64_t stride, int type, void* out, int64_t to) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < splits; i++) top = std::max(top, states[i * stride].max);
  Vec total[D / LANES] = {};
  for (int64_t i = 0; i < splits; i++) {
    const Softmax& part = states[i * stride];
    const float weight = std::exp(part.max - top);
    sum += part.sum * weight;
    for (int w = 0; w < D / LANES; w++) total[w] += weight * load(acc + i * stride * D + w * LANES);
  }
  for (int w = 0; w < D / LANES; w++) store_as(type, out, to + w * LANES, total[w] / (splits ? sum : 1.f));
}

struct DecodeTask {
  int32_t sequence, head, begin, end;
};

template <int D>
void decode(int type, const void* q, const Cache& pool, const int32_t* tables, const int32_t* lens, void* out,
            int64_t num_seqs, int64_t num_heads, int64_t table_stride, int64_t q_stride, float scale,
            const Variant& variant, int threads) {
  const int64_t num_kv_heads = pool.num_kv_heads;
  const int group = num_heads / num_kv_heads;
  std::vector<DecodeTask> tasks;
  std::vector<int64_t> first(num_seqs), num_splits(num_seqs);
  int64_t num_keys = 0;
  for (int32_t s = 0; s < num_seqs; s++) {
    first[s] = tasks.size();
    const int32_t seen = variant.first_seen(lens[s] - 1);
    num_keys += lens[s] - seen;
    num_splits[s] = (lens[s] + SPLIT - 1) / SPLIT - seen / SPLIT;
    for (int32_t h = 0; h < num_kv_heads; h++)
      for (int32_t begin = seen, end; begin < lens[s]; begin = end) {
        end = std::min(begin / SPLIT * SPLIT + SPLIT, lens[s]);
        tasks.push_back({s, h, begin, end});
      }
  }
  const int64_t num_tasks = tasks.size();
  if (num_keys * num_kv_heads * D < MIN_PARALLEL) threads = 1;
  std::vector<float> acc(num_tasks * group * D);
  std::vector<Softmax> states(num_tasks * group);
  share_tasks(num_tasks, num_seqs, threads, [&](auto& next) {
    std::vector<float> scaled(group * D);
    for (int64_t i; (i = next()) < num_tasks;) {
      const DecodeTask& task = tasks[i];
      const int64_t queries = task.sequence * q_stride + int64_t(task.head) * group * D;
      for (int j = 0; j < group * D; j += LANES) store(&scaled[j], load_as(type, q, queries + j) * scale);
      const Cache cache = pool.of(tables + task.sequence * table_stride, task.head);
      attend<D>(scaled.data(), group, lens[task.sequence] - 1, cache, variant, task.begin, task.end,
                &states[i * group], &acc[i * group * D]);
    }
  });
  if (num_seqs * num_heads * D < MIN_PARALLEL) threads = 1;
  share_tasks(num_seqs, num_seqs, threads, [&](auto& next) {
    for (int64_t s; (s = next()) < num_seqs;) {
      for (int64_t head = 0; head < num_heads; head++) {
        const int64_t begin = (first[s] + head / group * num_splits[s]) * group + head % group;
        merge<D>(&states[begin], &acc[begin * D], num_splits[s], group, type, out, (s * num_heads + head) * D);
      }
    }
  });
}

// c [TILE_ROWS, V LANES] = (or, with `add`, +=) a [TILE_ROWS, depth] times b [depth, V LANES].
template <int V>
void tile_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                  int64_t depth, bool add) {
  Vec acc[TILE_ROWS][V] = {};
  if (add)
    for (int r = 0; r < TILE_ROWS; r++)
      for (int v = 0; v < V; v++) acc[r][v] = load(c + r * c_stride + v * LANES);
  for (int64_t k = 0; k < depth; k++) {
    Vec row[V];
    for (int v = 0; v < V; v++) row[v] = load(b + k * b_stride + v * LANES);
    for (int r = 0; r < TILE_ROWS; r++)
      for (int v = 0; v < V; v++) acc[r][v] += a[r * a_stride + k] * row[v];
  }
  for (int r = 0; r < TILE_ROWS; r++)
    for (int v = 0; v < V; v++) store(c + r * c_stride + v * LANES, acc[r][v]);
}

// c [rows, columns] = or += a [rows, depth] times b [depth, columns]; rows are a multiple of TILE_ROWS.
void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
             int64_t rows, int64_t depth, int64_t columns, bool add) {
  constexpr int64_t WIDE = TILE_VECTORS * LANES;
  for (int64_t r = 0; r < rows; r += TILE_ROWS) {
    const float* from = a + r * a_stride;
    float* to = c + r * c_stride;
    int64_t j = 0;
    for (; j + WIDE <= columns; j += WIDE)
      tile_product<TILE_VECTORS>(from, a_stride, b + j, b_stride, to + j, c_stride, depth, add);
    for (; j < columns; j += LANES) tile_product<1>(from, a_stride, b + j, b_stride, to + j, c_stride, depth, add);
  }
}

// Buffers of one thread for a tile of queries.
template <int D>
struct Tile {
  int64_t rows;
  std::vector<float> queries, scratch, keys, values, scores, acc;
  std::vector<Softmax> states;

  explicit Tile(int64_t num_rows)
      : rows((num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS),
        queries(rows * D),
        scratch(KEY_TILE * D),
        keys(D * KEY_TILE),
        values(KEY_TILE * D),
        scores(rows * KEY_TILE),
        acc(rows * D),
        states(rows) {}

  void reset() {
    std::fill(acc.begin(), acc.end(), 0.f);
    std::fill(states.begin(), states.end(), Softmax{});
  }

  // n rows of D numbers, to columns KEY_TILE apart.
  static void put_columns(const float* rows, int64_t n, float* columns) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
      for (int64_t d = 0; d < D; d += LANES) {
        Vec square[LANES];
        for (int r = 0; r < LANES; r++) square[r] = load(rows + (i + r) * D + d);
        transpose(square);
        for (int c = 0; c < LANES; c++) store(columns + (d + c) * KEY_TILE + i, square[c]);
      }
    for (; i < n; i++)
      for (int64_t d = 0; d < D; d++) columns[d * KEY_TILE + i] = rows[i * D + d];
  }

  // Keys as columns, values as rows.
  void gather(const Cache& cache, int64_t begin, int64_t count) {
    for (int64_t t = 0; t < count;) {
      const int64_t n = std::min(cache.block_size - (begin + t) % cache.block_size, count - t);
      put_columns(cache.floats(begin + t, 0, n, scratch.data()), n, &keys[t]);
      cache.read(begin + t, 1, n, &values[t * D]);
      t += n;
    }
  }

  // Scores of one row become the variant's. The tile's first key lies `distance` from the row's query.
  void vary(int64_t row, const Variant& variant, int64_t head, int64_t distance) {
    const int hidden = variant.window ? std::max<int64_t>(0, 1 - variant.window - distance) : 0;
    for (int i = 0; i < KEY_TILE; i += LANES) {
      float* s = &scores[row * KEY_TILE + i];
      const Vec varied = variant.apply(load(s), head, distance + i);
      store(s, lane_numbers() < hidden - i ? broadcast(-INFINITY) : varied);
    }
  }

  // Scores of one row become weights; of the tile's keys it sees the first `visible`.
  void weigh(int64_t row, int64_t visible) {
    float* s = &scores[row * KEY_TILE];
    const IntVec lanes = lane_numbers();
    Vec top = broadcast(-INFINITY);
    for (int i = 0; i < KEY_TILE; i += LANES) {
      const Vec seen = lanes < int(visible) - i ? load(s + i) : broadcast(-INFINITY);
      store(s + i, seen);
      top = larger(seen, top);
    }
    if (max_of(top) == -INFINITY) {
      std::fill(s, s + KEY_TILE, 0.f);
      return;
    }
    const float shrink = raise(states[row], max_of(top));
    Vec sum = {};
    for (int i = 0; i < KEY_TILE; i += LANES) {
      const Vec weights = exp_of(load(s + i) - states[row].max);
      store(s + i, weights);
      sum += weights;
    }
    states[row].sum += sum_of(sum);
    if (shrink != 1.f)
      for (int d = 0; d < D; d += LANES) store(&acc[row * D + d], load(&acc[row * D + d]) * shrink);
  }
};

struct PrefillTask {
  int32_t sequence, head, begin, end;  // queries, counted from the chunk's first
};

template <int D>
void prefill(int type, const void* q, const Cache& pool, const int32_t* tables, const int32_t* query_start,
             const int32_t* lens, void* out, int64_t num_seqs, int64_t num_heads, int64_t table_stride,
             int64_t q_stride, float scale, const Variant& variant, int threads) {
  const int64_t num_kv_heads = pool.num_kv_heads;
  const int64_t group = num_heads / num_kv_heads;
  const int32_t tile_len = std::max<int64_t>(1, QUERY_ROWS / group);
  std::vector<PrefillTask> tasks;
  for (int32_t s = 0; s < num_seqs; s++) {
    const int32_t chunk_len = query_start[s + 1] - query_start[s];
    for (int32_t h = 0; h < num_kv_heads; h++)
      for (int32_t begin = 0; begin < chunk_len; begin += tile_len)
        tasks.push_back({s, h, begin, std::min(begin + tile_len, chunk_len)});
  }
  share_tasks(int64_t(tasks.size()), query_start[num_seqs], threads, [&](auto& next) {
    Tile<D> tile(tile_len * group);
    for (size_t i; (i = next()) < tasks.size();) {
      const PrefillTask& task = tasks[i];
      const int64_t start = query_start[task.sequence];
      const int64_t before = lens[task.sequence] - (query_start[task.sequence + 1] - start);
      const int64_t rows = (task.end - task.begin) * group;
      const Cache cache = pool.of(tables + task.sequence * table_stride, task.head);
      tile.reset();
      for (int64_t row = 0; row < rows; row++) {
        const int64_t from = (start + task.begin + row / group) * q_stride + (task.head * group + row % group) * D;
        for (int d = 0; d < D; d += LANES) store(&tile.queries[row * D + d], load_as(type, q, from + d) * scale);
      }
      const int64_t padded_rows = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
      for (int64_t at = variant.first_seen(before + task.begin); at < before + task.end; at += KEY_TILE) {
        const int64_t count = std::min<int64_t>(KEY_TILE, before + task.end - at);
        tile.gather(cache, at, count);
        product(tile.queries.data(), D, tile.keys.data(), KEY_TILE, tile.scores.data(), KEY_TILE, padded_rows, D,
                KEY_TILE, false);
        for (int64_t row = 0; row < padded_rows; row++) {
          const int64_t position = before + task.begin + row / group;
          if (!variant.is_plain()) tile.vary(row, variant, task.head * group + row % group, at - position);
          tile.weigh(row, row < rows ? std::min(position + 1 - at, count) : 0);
        }
        product(tile.scores.data(), KEY_TILE, tile.values.data(), D, tile.acc.data(), D, padded_rows, count, D, true);
      }
      for (int64_t row = 0; row < rows; row++) {
        const int64_t to = ((start + task.begin + row / group) * num_heads + task.head * group + row % group) * D;
        for (int d = 0; d < D; d += LANES)
          store_as(type, out, to + d, load(&tile.acc[row * D + d]) / tile.states[row].sum);
      }
    }
  });
}

}  // namespace

#define FOR_HEAD_DIM(call)           \
  switch (head_dim) {                \
    case 16: call(16); return 0;     \
    case 32: call(32); return 0;     \
    case 64: call(64); return 0;     \
    case 80: call(80); return 0;     \
    case 96: call(96); return 0;     \
    case 128: call(128); return 0;   \
    case 256: call(256); return 0;   \
    default: return 1;               \
  }

// Both return 1 for a type or a head_dim that they do not know. `type` is that of q and out; shapes are those of
// kernels/paged_attention.py; scales and slopes are null where there are none.
extern "C" {

int quire_paged_decode(int type, int cache_type, const void* q, const void* kv, const float* scales,
                       const int32_t* tables, const int32_t* lens, void* out, int64_t num_seqs, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t table_stride,
                       int64_t q_stride, float scale, int64_t window, float soft_cap, const float* slopes,
                       int threads) {
  const Variant variant{window, soft_cap, slopes};
  const Cache pool{cache_type, kv, scales, nullptr, num_kv_heads, block_size, head_dim, 0};
#define DECODE(D) \
  decode<D>(type, q, pool, tables, lens, out, num_seqs, num_heads, table_stride, q_stride, scale, variant, threads)
  FOR_HEAD_DIM(DECODE)
}

int quire_paged_prefill(int type, int cache_type, const void* q, const void* kv, const float* scales,
                        const int32_t* tables, const int32_t* query_start, const int32_t* lens, void* out,
                        int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t block_size, int64_t table_stride, int64_t q_stride, float scale, int64_t window,
                        float soft_cap, const float* slopes, int threads) {
  const Variant variant{window, soft_cap, slopes};
  const Cache pool{cache_type, kv, scales, nullptr, num_kv_heads, block_size, head_dim, 0};
#define PREFILL(D)                                                                                             \
  prefill<D>(type, q, pool, tables, query_start, lens, out, num_seqs, num_heads, table_stride, q_stride, scale, \
             variant, threads)
  FOR_HEAD_DIM(PREFILL)
}
}
