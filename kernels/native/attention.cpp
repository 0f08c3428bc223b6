// Attention over a paged KV cache [N, 2, Hkv, B, D] with an online softmax (Milakov and Gimelshein, 2018).
#include <algorithm>
#include <vector>

#include "vector.h"

namespace {

// A sequence's keys are cut at multiples of this, whatever else is in the batch: the same sums in any batch.
constexpr int SPLIT = 256;
// Keys times head_dim below which one thread is done before two have met.
constexpr int64_t MIN_PARALLEL = 1 << 16;
constexpr int KEY_TILE = 64;
constexpr int TILE_ROWS = 6;     // rows and vectors of a product that stay in registers
constexpr int TILE_VECTORS = LANES == 8 ? 2 : 4;  // AVX2 has 16 registers, the others 32
constexpr int QUERY_ROWS = 60;   // queries times heads of a group that share each tile of keys

template <typename T>
struct Cache {
  const T* data;
  const int32_t* table;  // of one sequence
  int64_t num_kv_heads, block_size, head_dim, head;

  // Keys (which = 0) or values (1) from a position to the end of its block: contiguous rows of head_dim.
  const T* rows(int64_t position, int which) const {
    const int64_t block = table[position / block_size];
    const int64_t piece = (block * 2 + which) * num_kv_heads + head;
    return data + (piece * block_size + position % block_size) * head_dim;
  }
};

// Blocks lie anywhere, so the processor cannot guess where the next one is.
template <typename T>
void prefetch(const T* rows, int64_t count) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += LINE) __builtin_prefetch(rows + i, 0, 2);
}

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

// Adds `n` keys, all of them in one block, to one query. With `n` a constant the sums stay in registers.
template <typename T, int D>
inline __attribute__((always_inline)) void attend_to(const float* q, const T* keys, const T* values, int n,
                                                     Softmax& state, float* acc) {
  constexpr int W = D / LANES;
  Vec query[W], dots[LANES] = {};
  for (int w = 0; w < W; w++) query[w] = load(q + w * LANES);
  for (int t = 0; t < n; t++)
    for (int w = 0; w < W; w++) dots[t] += query[w] * load(keys + t * D + w * LANES);
  Vec scores = sums_of(dots);
  if (n < LANES) scores = lane_numbers() < n ? scores : broadcast(-INFINITY);
  const float shrink = raise(state, max_of(scores));
  const Vec weights = exp_of(scores - state.max);
  state.sum += sum_of(weights);
  Vec out[W];
  for (int w = 0; w < W; w++) out[w] = load(acc + w * LANES) * shrink;
  for (int t = 0; t < n; t++)
    for (int w = 0; w < W; w++) out[w] += weights[t] * load(values + t * D + w * LANES);
  for (int w = 0; w < W; w++) store(acc + w * LANES, out[w]);
}

// Adds keys begin..end to one KV head's group of queries.
template <typename T, int D>
void attend(const float* q, int group, const Cache<T>& cache, int64_t begin, int64_t end, Softmax* states,
            float* acc) {
  for (int64_t at = begin; at < end;) {
    const int n = std::min<int64_t>({LANES, cache.block_size - at % cache.block_size, end - at});
    const T *keys = cache.rows(at, 0), *values = cache.rows(at, 1);
    if (at + n < end) {
      prefetch(cache.rows(at + n, 0), n * D);
      prefetch(cache.rows(at + n, 1), n * D);
    }
    for (int g = 0; g < group; g++) {
      const float* query = q + g * D;
      if (n == LANES)
        attend_to<T, D>(query, keys, values, LANES, states[g], acc + g * D);
      else
        attend_to<T, D>(query, keys, values, n, states[g], acc + g * D);
    }
    at += n;
  }
}

// One head's output from its parts, `stride` apart: softmaxes of the parts weigh by their maxima (Dao et al.,
// Flash-Decoding, 2023). Without parts it is 0.
template <typename T, int D>
void merge(const Softmax* states, const float* acc, int64_t splits, int64_t stride, T* out) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < splits; i++) top = std::max(top, states[i * stride].max);
  Vec total[D / LANES] = {};
  for (int64_t i = 0; i < splits; i++) {
    const Softmax& part = states[i * stride];
    const float weight = std::exp(part.max - top);
    sum += part.sum * weight;
    for (int w = 0; w < D / LANES; w++) total[w] += weight * load(acc + i * stride * D + w * LANES);
  }
  for (int w = 0; w < D / LANES; w++) store(out + w * LANES, total[w] / (splits ? sum : 1.f));
}

struct DecodeTask {
  int32_t sequence, head, begin, end;
};

template <typename T, int D>
void decode(const T* q, const T* kv, const int32_t* tables, const int32_t* lens, T* out, int64_t num_seqs,
            int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t table_stride, int64_t q_stride,
            float scale, int threads) {
  const int group = num_heads / num_kv_heads;
  std::vector<DecodeTask> tasks;
  std::vector<int64_t> first(num_seqs);
  int64_t num_keys = 0;
  for (int32_t s = 0; s < num_seqs; s++) {
    first[s] = tasks.size();
    num_keys += lens[s];
    for (int32_t h = 0; h < num_kv_heads; h++)
      for (int32_t begin = 0; begin < lens[s]; begin += SPLIT)
        tasks.push_back({s, h, begin, std::min(begin + SPLIT, lens[s])});
  }
  const int64_t num_tasks = tasks.size();
  if (num_keys * num_kv_heads * D < MIN_PARALLEL) threads = 1;
  std::vector<float> acc(num_tasks * group * D);
  std::vector<Softmax> states(num_tasks * group);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < num_tasks; i++) {
    const DecodeTask& task = tasks[i];
    std::vector<float> scaled(group * D);
    const T* queries = q + task.sequence * q_stride + int64_t(task.head) * group * D;
    for (int j = 0; j < group * D; j += LANES) store(&scaled[j], load(queries + j) * scale);
    const Cache<T> cache{kv, tables + task.sequence * table_stride, num_kv_heads, block_size, D, task.head};
    attend<T, D>(scaled.data(), group, cache, task.begin, task.end, &states[i * group], &acc[i * group * D]);
  }
#pragma omp parallel for schedule(static) num_threads(threads) if (num_seqs * num_heads * D >= MIN_PARALLEL)
  for (int64_t s = 0; s < num_seqs; s++) {
    const int64_t splits = (lens[s] + SPLIT - 1) / SPLIT;
    for (int64_t head = 0; head < num_heads; head++) {
      const int64_t begin = (first[s] + head / group * splits) * group + head % group;
      merge<T, D>(&states[begin], &acc[begin * D], splits, group, out + (s * num_heads + head) * D);
    }
  }
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
  std::vector<float> queries, keys, values, scores, acc;
  std::vector<Softmax> states;

  explicit Tile(int64_t num_rows)
      : rows((num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS),
        queries(rows * D),
        keys(D * KEY_TILE),
        values(KEY_TILE * D),
        scores(rows * KEY_TILE),
        acc(rows * D),
        states(rows) {}

  void reset() {
    std::fill(acc.begin(), acc.end(), 0.f);
    std::fill(states.begin(), states.end(), Softmax{});
  }

  // Keys as columns, values as rows.
  template <typename T>
  void gather(const Cache<T>& cache, int64_t begin, int64_t count) {
    for (int64_t t = 0; t < count;) {
      const int64_t n = std::min(cache.block_size - (begin + t) % cache.block_size, count - t);
      const T *k = cache.rows(begin + t, 0), *v = cache.rows(begin + t, 1);
      for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) keys[d * KEY_TILE + t + i] = to_float(k[i * D + d]);
      for (int64_t i = 0; i < n * D; i += LANES) store(&values[t * D + i], load(v + i));
      t += n;
    }
  }

  // Scores of one row become weights; of the tile's keys it sees the first `visible`.
  void weigh(int64_t row, int64_t visible) {
    float* s = &scores[row * KEY_TILE];
    if (visible <= 0) {
      std::fill(s, s + KEY_TILE, 0.f);
      return;
    }
    const IntVec lanes = lane_numbers();
    Vec top = broadcast(-INFINITY);
    for (int i = 0; i < KEY_TILE; i += LANES) {
      const Vec seen = lanes < int(visible) - i ? load(s + i) : broadcast(-INFINITY);
      store(s + i, seen);
      top = larger(seen, top);
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

template <typename T, int D>
void prefill(const T* q, const T* kv, const int32_t* tables, const int32_t* query_start, const int32_t* lens, T* out,
             int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t table_stride,
             int64_t q_stride, float scale, int threads) {
  const int64_t group = num_heads / num_kv_heads;
  const int32_t tile_len = std::max<int64_t>(1, QUERY_ROWS / group);
  std::vector<PrefillTask> tasks;
  for (int32_t s = 0; s < num_seqs; s++) {
    const int32_t chunk_len = query_start[s + 1] - query_start[s];
    for (int32_t h = 0; h < num_kv_heads; h++)
      for (int32_t begin = 0; begin < chunk_len; begin += tile_len)
        tasks.push_back({s, h, begin, std::min(begin + tile_len, chunk_len)});
  }
#pragma omp parallel num_threads(threads)
  {
    Tile<D> tile(tile_len * group);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); i++) {
      const PrefillTask& task = tasks[i];
      const int64_t start = query_start[task.sequence];
      const int64_t before = lens[task.sequence] - (query_start[task.sequence + 1] - start);
      const int64_t rows = (task.end - task.begin) * group;
      const Cache<T> cache{kv, tables + task.sequence * table_stride, num_kv_heads, block_size, D, task.head};
      tile.reset();
      for (int64_t row = 0; row < rows; row++) {
        const T* from = q + (start + task.begin + row / group) * q_stride + (task.head * group + row % group) * D;
        for (int d = 0; d < D; d += LANES) store(&tile.queries[row * D + d], load(from + d) * scale);
      }
      const int64_t padded_rows = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
      for (int64_t at = 0; at < before + task.end; at += KEY_TILE) {
        const int64_t count = std::min<int64_t>(KEY_TILE, before + task.end - at);
        tile.gather(cache, at, count);
        product(tile.queries.data(), D, tile.keys.data(), KEY_TILE, tile.scores.data(), KEY_TILE, padded_rows, D,
                KEY_TILE, false);
        for (int64_t row = 0; row < padded_rows; row++) {
          const int64_t visible = before + task.begin + row / group + 1 - at;
          tile.weigh(row, row < rows ? std::min(visible, count) : 0);
        }
        product(tile.scores.data(), KEY_TILE, tile.values.data(), D, tile.acc.data(), D, padded_rows, count, D, true);
      }
      for (int64_t row = 0; row < rows; row++) {
        T* to = out + ((start + task.begin + row / group) * num_heads + task.head * group + row % group) * D;
        for (int d = 0; d < D; d += LANES) store(to + d, load(&tile.acc[row * D + d]) / tile.states[row].sum);
      }
    }
  }
}

}  // namespace

#define FOR_HEAD_DIM(function, T)      \
  switch (head_dim) {                  \
    case 16: function(T, 16); break;   \
    case 32: function(T, 32); break;   \
    case 64: function(T, 64); break;   \
    case 80: function(T, 80); break;   \
    case 96: function(T, 96); break;   \
    case 128: function(T, 128); break; \
    case 256: function(T, 256); break; \
    default: return 1;                 \
  }                                    \
  return 0

// Both return 1 for a head_dim that they do not know. Shapes are those of kernels/paged_attention.py.
extern "C" {

int quire_paged_decode(int is_bf16, const void* q, const void* kv, const int32_t* tables, const int32_t* lens,
                       void* out, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                       int64_t block_size, int64_t table_stride, int64_t q_stride, float scale, int threads) {
#define DECODE(T, D)                                                                                        \
  decode<T, D>((const T*)q, (const T*)kv, tables, lens, (T*)out, num_seqs, num_heads, num_kv_heads, block_size, \
               table_stride, q_stride, scale, threads)
  if (is_bf16) {
    FOR_HEAD_DIM(DECODE, bf16);
  }
  FOR_HEAD_DIM(DECODE, float);
}

int quire_paged_prefill(int is_bf16, const void* q, const void* kv, const int32_t* tables,
                        const int32_t* query_start, const int32_t* lens, void* out, int64_t num_seqs,
                        int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                        int64_t table_stride, int64_t q_stride, float scale, int threads) {
#define PREFILL(T, D)                                                                                            \
  prefill<T, D>((const T*)q, (const T*)kv, tables, query_start, lens, (T*)out, num_seqs, num_heads, num_kv_heads, \
                block_size, table_stride, q_stride, scale, threads)
  if (is_bf16) {
    FOR_HEAD_DIM(PREFILL, bf16);
  }
  FOR_HEAD_DIM(PREFILL, float);
}
}
