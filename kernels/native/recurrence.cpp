// Recurrences over the tokens of each sequence (kernels/recurrence.py). A task is one sequence and some channels or
// columns of a state, which stay in the first-level cache for all of its tokens. The order of all sums is fixed, so
// that neither other sequences nor the cut of a prompt into chunks change a bit.
#include <cmath>
#include <vector>

#include "activation.h"
#include "constants.h"
#include "simd.h"
#include "thread_pool.h"

namespace {

// Columns of a task: vectors that share the loads of keys and queries.
constexpr int VECTORS = 4;
constexpr int64_t MAX_COLUMNS = VECTORS * LANES;
// Channels of a task of a convolution.
constexpr int64_t CONV_COLUMNS = 128;
// Elements read and written below which one thread is faster than several.
constexpr int64_t MIN_PARALLEL = 1 << 15;

struct Runs {
  const int32_t *slots, *starts, *ends;
  const uint8_t *is_new, *stores;  // stores: nullptr if all do
  int64_t count;

  int64_t num_tokens() const { return ends[count - 1] - starts[0]; }
  bool store(int64_t sequence) const { return stores == nullptr || stores[sequence]; }
};

// Calls body(sequence, part) for each part of each sequence; `elements` are those of all parts together.
template <typename Body>
void for_parts(const Runs& runs, int64_t num_parts, int64_t elements, int threads, const Body& body) {
  if (elements < MIN_PARALLEL) threads = 1;
  const int64_t count = runs.count * num_parts;
  parallel_for(count, threads, [&](auto& next) {
    for (int64_t i; (i = next()) < count;) body(i / num_parts, i % num_parts);
  });
}

// Calls body with the number of vectors in `columns`, a constant.
template <int COUNT = VECTORS, typename Body>
void with_vectors(int64_t columns, const Body& body) {
  if constexpr (COUNT > 1) {
    if (columns < COUNT * LANES) return with_vectors<COUNT - 1>(columns, body);
  }
  body(std::integral_constant<int, COUNT>());
}

// T: the type of tokens; S: that of states.
template <typename T, typename S>
struct LinearAttention {
  const T *q, *k, *v;
  const float *log_decay, *beta;
  S* states;
  T* out;
  int64_t num_heads, heads_per_key, key_dim, value_dim, q_stride, k_stride, v_stride, decays_per_head;
  float scale;
  bool delta;

  bool reads_state() const { return delta && beta != nullptr; }

  // The key, query and decay of a token in float32, and the products of key and decay, by which the update of the delta
  // rule reads the state before the token.
  struct Token {
    float *keys, *queries, *decays, *decayed;
  };

  void read_token(int64_t t, int64_t head, const Token& to) const {
    const int64_t key_head = head / heads_per_key;
    const T *key = k + t * k_stride + key_head * key_dim, *query = q + t * q_stride + key_head * key_dim;
    const float* logs = log_decay + (t * num_heads + head) * decays_per_head;
    const float decay = decays_per_head == 1 ? std::exp(logs[0]) : 0.f;
    for (int64_t d = 0; d < key_dim; d++) {
      to.keys[d] = to_float(key[d]);
      to.queries[d] = to_float(query[d]) * scale;
      to.decays[d] = decays_per_head == 1 ? decay : std::exp(logs[d]);
      to.decayed[d] = to.keys[d] * to.decays[d];
    }
  }

  // Adds the outer product of a token's key and `update` to the decayed state, whose result is `sums`. With NEXT the
  // same pass reads the new state for the next token, `next_sums`: the state fills the first-level cache, and two passes
  // per token take 1.85 times as long (heads of 128 elements, AVX-512).
  template <bool NEXT, int COUNT>
  void step(float* local, const Token& token, const float* next_decayed, const Vec* update, Vec* sums,
            Vec* next_sums) const {
    constexpr int64_t WIDTH = COUNT * LANES;
    Vec own[COUNT], results[COUNT] = {}, next[COUNT] = {};
    for (int i = 0; i < COUNT; i++) own[i] = update[i];
    for (int64_t d = 0; d < key_dim; d++) {
      const float decay = token.decays[d], key = token.keys[d], query = token.queries[d];
      for (int i = 0; i < COUNT; i++) {
        float* const at = local + d * WIDTH + i * LANES;
        const Vec now = load(at) * decay + key * own[i];
        store(at, now);
        results[i] += query * now;
        if constexpr (NEXT) next[i] += next_decayed[d] * now;
      }
    }
    for (int i = 0; i < COUNT; i++) sums[i] = results[i], next_sums[i] = next[i];
  }

  // Computes columns [column, column + COUNT * LANES) of one head's state for tokens [start, end).
  template <int COUNT>
  void run(S* state, bool is_new, bool stores, int64_t start, int64_t end, int64_t head, int64_t column) const {
    constexpr int64_t WIDTH = COUNT * LANES;
    static thread_local std::vector<float> buffer;
    buffer.resize(key_dim * (WIDTH + 8));
    float* const local = buffer.data();
    const auto token_at = [&](int64_t t) {
      float* const at = local + key_dim * (WIDTH + 4 * (t & 1));
      return Token{at, at + key_dim, at + 2 * key_dim, at + 3 * key_dim};
    };
    for (int64_t d = 0; d < key_dim; d++)
      for (int64_t i = 0; i < WIDTH; i += LANES)
        store(local + d * WIDTH + i, is_new ? Vec{} : load(state + d * value_dim + column + i));
    Vec update[COUNT], sums[COUNT], before[COUNT] = {};  // before: key times the decayed state before the token
    if (start < end) read_token(start, head, token_at(start));
    for (int64_t d = 0; reads_state() && start < end && d < key_dim; d++)
      for (int i = 0; i < COUNT; i++)
        before[i] += token_at(start).decayed[d] * load(local + d * WIDTH + i * LANES);
    for (int64_t t = start; t < end; t++) {
      const float rate = beta == nullptr ? 1.f : beta[t * num_heads + head];
      for (int i = 0; i < COUNT; i++) {
        update[i] = load(v + t * v_stride + head * value_dim + column + i * LANES);
        if (beta != nullptr) update[i] = rate * (update[i] - before[i]);
      }
      const Token token = token_at(t), next = token_at(t + 1);
      if (t + 1 < end) read_token(t + 1, head, next);
      if (reads_state() && t + 1 < end)
        step<true, COUNT>(local, token, next.decayed, update, sums, before);
      else
        step<false, COUNT>(local, token, nullptr, update, sums, before);
      for (int i = 0; i < COUNT; i++)
        store(out + (t * num_heads + head) * value_dim + column + i * LANES, sums[i]);
    }
    for (int64_t d = 0; stores && d < key_dim; d++)
      for (int64_t i = 0; i < WIDTH; i += LANES)
        store(state + d * value_dim + column + i, load(local + d * WIDTH + i));
  }

  void compute(const Runs& runs, int threads) const {
    const int64_t parts_per_head = (value_dim + MAX_COLUMNS - 1) / MAX_COLUMNS, state_size = key_dim * value_dim;
    const int64_t elements = (runs.num_tokens() + runs.count) * num_heads * state_size;
    for_parts(runs, num_heads * parts_per_head, elements, threads, [&](int64_t sequence, int64_t part) {
      const int64_t head = part / parts_per_head, first = part % parts_per_head * MAX_COLUMNS;
      S* const state = states + (runs.slots[sequence] * num_heads + head) * state_size;
      with_vectors(std::min(MAX_COLUMNS, value_dim - first), [&](auto count) {
        run<count>(state, runs.is_new[sequence], runs.store(sequence), runs.starts[sequence], runs.ends[sequence], head,
                   first);
      });
    });
  }
};

// weight [K, C].
template <typename T>
void causal_conv(const T* x, int64_t x_stride, const T* weight, const T* bias, T* states, const Runs& runs, T* out,
                 int64_t channels, int64_t width, bool silu, int threads) {
  const int64_t num_parts = (channels + CONV_COLUMNS - 1) / CONV_COLUMNS, before = width - 1;
  const int64_t elements = (runs.num_tokens() + runs.count) * channels * width;
  for_parts(runs, num_parts, elements, threads, [&](int64_t sequence, int64_t part) {
    const int64_t first = part * CONV_COLUMNS, last = std::min(first + CONV_COLUMNS, channels);
    const int64_t start = runs.starts[sequence], length = runs.ends[sequence] - start;
    T* const state = states + runs.slots[sequence] * before * channels;
    const bool is_new = runs.is_new[sequence];
    // The input at position `t` of the run; earlier ones are in the state.
    const auto input = [&](int64_t t, int64_t column) {
      if (t >= 0) return load(x + (start + t) * x_stride + column);
      return is_new ? Vec{} : load(state + (before + t) * channels + column);
    };
    // Row by row: the rows of one column are often a multiple of 4 KiB apart, in the same set of the cache. Column by
    // column takes 2.7 times as long for 2,048 channels.
    for (int64_t t = 0; t < length; t++)
      for (int64_t column = first; column < last; column += LANES) {
        Vec sum = bias == nullptr ? Vec{} : load(bias + column);
        for (int64_t i = 0; i < width; i++) sum += load(weight + i * channels + column) * input(t - before + i, column);
        store(out + (start + t) * channels + column, silu ? activate<SILU>(sum) : sum);
      }
    // In this order an input of the state is read before it is overwritten.
    for (int64_t i = 0; runs.store(sequence) && i < before; i++)
      for (int64_t column = first; column < last; column += LANES)
        store(state + i * channels + column, input(length - before + i, column));
  });
}

// decay and states [N, C].
template <typename T, typename S>
void selective_scan(const T* x, int64_t x_stride, const float* step, const float* decay, const T* b, const T* c,
                    int64_t bc_stride, S* states, const Runs& runs, float* out, int64_t channels, int64_t num_states,
                    int threads) {
  const int64_t elements = (runs.num_tokens() + runs.count) * channels * num_states;
  for_parts(runs, channels / LANES, elements, threads, [&](int64_t sequence, int64_t part) {
    const int64_t column = part * LANES;
    S* const state = states + runs.slots[sequence] * num_states * channels + column;
    static thread_local std::vector<float> buffer;
    buffer.resize(num_states * LANES);
    float* const local = buffer.data();
    for (int64_t n = 0; n < num_states; n++)
      store(local + n * LANES, runs.is_new[sequence] ? Vec{} : load(state + n * channels));
    for (int64_t t = runs.starts[sequence]; t < runs.ends[sequence]; t++) {
      const Vec size = load(step + t * channels + column), added = size * load(x + t * x_stride + column);
      Vec sum{};
      for (int64_t n = 0; n < num_states; n++) {
        const Vec now = exp_of(size * load(decay + n * channels + column)) * load(local + n * LANES) +
                        added * to_float(b[t * bc_stride + n]);
        store(local + n * LANES, now);
        sum += now * to_float(c[t * bc_stride + n]);
      }
      store(out + t * channels + column, sum);
    }
    for (int64_t n = 0; runs.store(sequence) && n < num_states; n++)
      store(state + n * channels, load(local + n * LANES));
  });
}

// sqrt(1 - exp(2 x)) for x <= 0. Near 0 the difference would lose its digits, so there it is the series of -expm1.
inline Vec room_beside(Vec x) {
  const Vec doubled = 2.f * x;
  const Vec series = -doubled * (1.f + doubled * (1.f / 2 + doubled * (1.f / 6 + doubled * (1.f / 24))));
  Vec room = doubled > -0.03f ? series : 1.f - exp_of(doubled);
  for (int lane = 0; lane < LANES; lane++) room[lane] = std::sqrt(room[lane]);
  return room;
}

// gates [H, T, 2 W], for each head those of the input and of the decay; decay [C]; W is a multiple of LANES.
template <typename T, typename S>
void rg_lru(const T* x, const T* gates, const float* decay, S* states, const Runs& runs, T* out, int64_t num_tokens,
            int64_t channels, int64_t width, int threads) {
  const int64_t elements = (runs.num_tokens() + runs.count) * channels;
  for_parts(runs, channels / LANES, elements, threads, [&](int64_t sequence, int64_t part) {
    const int64_t column = part * LANES, head = column / width;
    const T* const own = gates + head * num_tokens * 2 * width + column % width;
    S* const kept = states + runs.slots[sequence] * channels + column;
    const Vec slowest = load(decay + column);
    Vec state = runs.is_new[sequence] ? Vec{} : load(kept);
    for (int64_t t = runs.starts[sequence]; t < runs.ends[sequence]; t++) {
      const bool is_first = runs.is_new[sequence] && t == runs.starts[sequence];
      const Vec input = activate<SIGMOID>(load(own + t * 2 * width));
      const Vec exponent = activate<SIGMOID>(load(own + t * 2 * width + width)) * slowest;
      const Vec added = input * load(x + t * channels + column);
      state = exp_of(exponent) * state + (is_first ? added : room_beside(exponent) * added);
      store(out + t * channels + column, state);
    }
    if (runs.store(sequence)) store(kept, state);
  });
}

}  // namespace

// Of states, which are no float16.
#define FOR_STATE_DTYPE(call)      \
  do {                             \
    if (state_dtype == BFLOAT16) { \
      using S = bf16;              \
      FOR_DTYPE(call);             \
    } else {                       \
      using S = float;             \
      FOR_DTYPE(call);             \
    }                              \
  } while (0)

// value_dim and channels are multiples of LANES. Strides are those of tokens; heads are adjacent.
extern "C" {

void quire_linear_attention(int dtype, int state_dtype, const void* q, const void* k, const void* v,
                            const float* log_decay, const float* beta, void* states, const int32_t* slots, const int32_t* starts,
                            const int32_t* ends, const uint8_t* is_new, const uint8_t* stores, void* out,
                            int64_t num_sequences, int64_t num_heads,
                            int64_t heads_per_key, int64_t key_dim, int64_t value_dim, int64_t q_stride,
                            int64_t k_stride, int64_t v_stride, int64_t decays_per_head, float scale, int delta,
                            int threads) {
  const Runs runs{slots, starts, ends, is_new, stores, num_sequences};
  FOR_STATE_DTYPE((LinearAttention<T, S>{(const T*)q, (const T*)k, (const T*)v, log_decay, beta, (S*)states, (T*)out,
                                         num_heads, heads_per_key, key_dim, value_dim, q_stride, k_stride, v_stride,
                                         decays_per_head, scale, delta != 0}
                       .compute(runs, threads)));
}

void quire_causal_conv(int dtype, const void* x, const void* weight, const void* bias, void* states,
                       const int32_t* slots, const int32_t* starts, const int32_t* ends, const uint8_t* is_new,
                       const uint8_t* stores, void* out,
                       int64_t num_sequences, int64_t channels, int64_t width, int64_t x_stride, int silu,
                       int threads) {
  const Runs runs{slots, starts, ends, is_new, stores, num_sequences};
  FOR_DTYPE(causal_conv((const T*)x, x_stride, (const T*)weight, (const T*)bias, (T*)states, runs, (T*)out, channels,
                        width, silu, threads));
}

void quire_rg_lru(int dtype, int state_dtype, const void* x, const void* gates, const float* decay, void* states,
                  const int32_t* slots, const int32_t* starts, const int32_t* ends, const uint8_t* is_new,
                  const uint8_t* stores, void* out, int64_t num_sequences, int64_t num_tokens, int64_t channels,
                  int64_t width, int threads) {
  const Runs runs{slots, starts, ends, is_new, stores, num_sequences};
  FOR_STATE_DTYPE(rg_lru((const T*)x, (const T*)gates, decay, (S*)states, runs, (T*)out, num_tokens, channels, width,
                         threads));
}

void quire_selective_scan(int dtype, int state_dtype, const void* x, const float* step, const float* decay,
                          const void* b, const void* c, void* states, const int32_t* slots, const int32_t* starts,
                          const int32_t* ends, const uint8_t* is_new, const uint8_t* stores, float* out, int64_t num_sequences, int64_t channels,
                          int64_t num_states, int64_t x_stride, int64_t bc_stride, int threads) {
  const Runs runs{slots, starts, ends, is_new, stores, num_sequences};
  FOR_STATE_DTYPE(selective_scan((const T*)x, x_stride, step, decay, (const T*)b, (const T*)c, bc_stride, (S*)states,
                                 runs, out, channels, num_states, threads));
}
}
