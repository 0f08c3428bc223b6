// Linear layers: products of tokens and a packed weight (packed_weights.h).
//
// Up to MAX_TILE_TOKENS tokens are multiplied in one pass over the weight. For more tokens a block of a panel stays in
// the cache for all of them, and a tile of tokens times outputs stays in registers, as in Goto and van de Geijn, Anatomy
// of High-Performance Matrix Multiplication, 2008. Either way the products of an output are added in the order of the
// inputs, so a token's result does not depend on the number of tokens.
//
// Where the processor has tile registers, they multiply bfloat16 at every number of tokens (tile_products.h): they add in
// another order than vector registers do.
//
// The layer before a gated activation (activation.h) writes only the activated outputs for many tokens: its own are
// twice as many, and for a long prompt more than the allocator keeps, so that each of their pages is cleared anew.
#include <memory>
#include <type_traits>
#include <utility>

#include "activation.h"
#include "ops.h"
#include "packed_weights.h"
#include "thread_pool.h"
#include "tile_products.h"

namespace {

// Tokens of a tile. The accumulators fill the registers; with AVX-512 the few that spill at 8 tokens cost less than a
// second pass over the panel.
constexpr int MAX_TILE_TOKENS = LANES == 16 ? 8 : 6;
// A tile of few tokens spans several panels, up to this many accumulators, to hide the latency of an addition.
constexpr int MAX_WIDE_ACCUMULATORS = LANES == 16 ? 4 : NUM_REGISTERS == 32 ? 16 : 12;
// Panels that a thread takes at a time for few tokens: at least 64 outputs.
constexpr int64_t TASK_PANELS = std::max(1, 64 / PANEL_LEN);
// Tokens that read the weight from memory together, and inputs of a panel that they read at a time: a block stays in
// the second-level cache. Blocks of 256 inputs, which fit into the first-level cache, are up to 5 % slower.
constexpr int64_t CHUNK_TOKENS = 240;
constexpr int64_t BLOCK_INPUTS = 4096;
// Inputs that are widened at a time. With 256, 1,024 tokens are up to 9 % slower.
constexpr int64_t WIDENED_INPUTS = 1024;
// Up to this many tokens each tile widens the rows of a panel itself, which takes up to 40 % less time for 8 tokens.
// It needs registers for that, so its accumulators are those of fewer tokens.
constexpr int64_t MAX_UNWIDENED_TOKENS = 32;
constexpr int64_t MAX_WIDENING_TILE_TOKENS = 4;
// With AVX2, 8 tokens are 1.3 times as fast packed; with AVX-512 packing costs 3 to 5 % and gains nothing.
constexpr bool PACKS_TOKENS = NUM_REGISTERS == 16;
// Few tokens are bound by memory: the weight is prefetched this many bytes ahead, into all caches. With AVX2 4 tokens take
// 0.63 of the time that the hardware prefetcher alone achieves, with AVX-512 6 tokens 0.73. The non-temporal hint would
// keep weights out of an Intel processor's third-level cache: one stream of a 60M model was 3.5 times slower with it.
constexpr int64_t PREFETCH_BYTES = 4096;

// While the tiles of some tokens multiply a block, they prefetch the next one into the second-level cache, up to this
// many bytes, half of that cache. Otherwise the first tile of each panel waits for memory: 32 tokens take 1.2 times as
// long.
constexpr int64_t MAX_AHEAD_BYTES = 512 << 10;
constexpr int64_t CACHE_LINE = 64;
// Cache lines that a tile prefetches per row: at least two tiles share a block, so half of a row is enough.
constexpr int AHEAD_LINES = (PANEL_LEN * sizeof(float) / 2 + CACHE_LINE - 1) / CACHE_LINE;

// Memory that a tile prefetches, `step` bytes further for each row.
struct Ahead {
  const char* next;
  int64_t step;
};

// Panels that a tile of m tokens spans.
constexpr int tile_panels(int m) {
  int count = 1;
  while (2 * count * PANEL_VECTORS * m <= MAX_WIDE_ACCUMULATORS) count *= 2;
  return count;
}

// Adds M tokens times `rows` rows of P panels to sums [M, P PANEL_LEN], whose rows are `sums_stride` apart. The tokens
// are [rows, M, inputs of a row] if IS_PACKED, otherwise `x_stride` numbers apart. Prefetches NUM_LINES cache lines of
// `ahead` per row; if that is 0, the panels themselves.
template <typename Format, int M, int P, bool IS_PACKED, int NUM_LINES = 0>
void add_tile(const typename Format::Input* x, int64_t x_stride, const typename Format::Number* weight,
              int64_t panel_stride, int64_t rows, float* sums, int64_t sums_stride, Ahead ahead = {}) {
  constexpr int INPUTS = ROW_INPUTS<Format>, W = P * PANEL_VECTORS;
  Vec acc[M][W];
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) acc[m][i] = load(sums + m * sums_stride + i * LANES);
  for (int64_t row = 0; row < rows; row++) {
    for (int line = 0; line < NUM_LINES; line++) __builtin_prefetch(ahead.next + line * CACHE_LINE, 0, 2);
    ahead.next += ahead.step;
    for (int step = 0; step < Format::STEPS; step++) {
      const auto columns = [&](int i) {
        const int64_t at = (row * PANEL_LEN + i % PANEL_VECTORS * LANES) * INPUTS;
        const auto* numbers = weight + i / PANEL_VECTORS * panel_stride + at;
        const bool begins_line = i * LANES * INPUTS * sizeof(*numbers) % CACHE_LINE == 0;
        if (NUM_LINES == 0 && step == 0 && begins_line)
          __builtin_prefetch((const char*)numbers + PREFETCH_BYTES, 0, 3);
        return Format::columns(numbers, step);
      };
      const auto inputs = [&](int m) {
        return x + (IS_PACKED ? (row * M + m) * INPUTS : m * x_stride + row * INPUTS) + step * Format::STEP_INPUTS;
      };
      // Whichever side is smaller stays in registers.
      if constexpr (NUM_REGISTERS == 32 || W <= M) {
        typename Format::Columns w[W];
        for (int i = 0; i < W; i++) w[i] = columns(i);
        for (int m = 0; m < M; m++)
          for (int i = 0; i < W; i++) Format::add(acc[m][i], w[i], inputs(m));
      } else {
        for (int i = 0; i < W; i++) {
          const auto w = columns(i);
          for (int m = 0; m < M; m++) Format::add(acc[m][i], w, inputs(m));
        }
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int i = 0; i < W; i++) store(sums + m * sums_stride + i * LANES, acc[m][i]);
}

// Calls body(std::integral_constant<int, M>{}) for M = count, from 1 to MAX_TILE_TOKENS.
template <typename Body, int... M>
void with_count(int64_t count, const Body& body, std::integer_sequence<int, M...>) {
  ((count == M + 1 ? body(std::integral_constant<int, M + 1>{}) : void()), ...);
}

template <typename Body>
void with_count(int64_t count, const Body& body) {
  with_count(count, body, std::make_integer_sequence<int, MAX_TILE_TOKENS>());
}

// The outputs of one panel from their sums: multiplied by the scales, plus the bias.
template <typename Format, typename T>
struct PanelOutputs {
  int64_t begin, width;
  float scales[PANEL_LEN], offsets[PANEL_LEN];

  PanelOutputs(const PackedMatrix<Format>& weight, int64_t panel, const T* bias)
      : begin(panel * PANEL_LEN), width(std::min<int64_t>(PANEL_LEN, weight.out_features - begin)) {
    for (int64_t n = 0; n < width; n++) {
      scales[n] = weight.scales ? weight.scales[begin + n] : 1.f;
      offsets[n] = bias ? to_float(bias[begin + n]) : 0.f;
    }
  }

  Vec vector(const float* sums, int64_t n) const { return load(sums + n) * load(scales + n) + load(offsets + n); }
  float one(const float* sums, int64_t n) const { return sums[n] * scales[n] + offsets[n]; }
};

// The result y [T, N] of a linear layer, whose rows are y_stride numbers apart. Sums have rows that are `stride` numbers
// apart.
template <typename Format, typename T>
struct Outputs {
  static constexpr int PARTS = 1;

  const PackedMatrix<Format>& weight;
  const T* bias;
  T* y;
  int64_t y_stride;

  int64_t num_panels() const { return weight.count(); }
  Outputs from(int64_t token) const { return {weight, bias, y + token * y_stride, y_stride}; }

  void write(int64_t panel, const float* sums, int64_t stride, int64_t count) const {
    const PanelOutputs<Format, T> outputs(weight, panel, bias);
    for (int64_t m = 0; m < count; m++, sums += stride) {
      T* to = y + m * y_stride + outputs.begin;
      int64_t n = 0;
      for (; n + LANES <= outputs.width; n += LANES) store(to + n, outputs.vector(sums, n));
      for (; n < outputs.width; n++) store_one(to + n, outputs.one(sums, n));
    }
  }
};

// The result y [T, N / 2] of a linear layer and a gated activation. Both halves of the outputs are whole panels; the
// sums of the gate's are followed by those of the others.
template <typename Format, typename T>
struct GatedOutputs {
  static constexpr int PARTS = 2;

  const PackedMatrix<Format>& weight;
  const T* bias;
  T* y;
  Gate gate;

  int64_t num_panels() const { return weight.count() / 2; }
  GatedOutputs from(int64_t token) const { return {weight, bias, y + token * weight.out_features / 2, gate}; }

  void write(int64_t panel, const float* sums, int64_t stride, int64_t count) const {
    if (gate == GELU_TANH)
      write_as<GELU_TANH>(panel, sums, stride, count);
    else
      write_as<SILU>(panel, sums, stride, count);
  }

  template <Gate GATE>
  void write_as(int64_t panel, const float* sums, int64_t stride, int64_t count) const {
    const PanelOutputs<Format, T> gates(weight, panel, bias), ups(weight, num_panels() + panel, bias);
    const float* up_sums = sums + count * stride;
    for (int64_t m = 0; m < count; m++, sums += stride, up_sums += stride) {
      T* to = y + m * weight.out_features / 2 + gates.begin;
      for (int64_t n = 0; n < PANEL_LEN; n += LANES)
        store(to + n, activate<GATE>(rounded<T>(gates.vector(sums, n))) * rounded<T>(ups.vector(up_sums, n)));
    }
  }
};

// sums [M, TASK_PANELS PANEL_LEN] += x [M, K] times `count` panels.
template <typename Format, int M>
void add_panels(const typename Format::Input* x, const PackedMatrix<Format>& weight, int64_t first, int64_t count,
                float* sums) {
  constexpr int P = tile_panels(M);
  const int64_t rows = weight.in_features / ROW_INPUTS<Format>;
  const auto* panels = weight.data + first * weight.stride;
  int64_t i = 0;
  for (; i + P <= count; i += P)
    add_tile<Format, M, P, false>(x, weight.in_features, panels + i * weight.stride, weight.stride, rows,
                                  sums + i * PANEL_LEN, TASK_PANELS * PANEL_LEN);
  for (; i < count; i++)
    add_tile<Format, M, 1, false>(x, weight.in_features, panels + i * weight.stride, weight.stride, rows,
                                  sums + i * PANEL_LEN, TASK_PANELS * PANEL_LEN);
}

// The product for at most MAX_TILE_TOKENS tokens.
template <typename Format, typename T>
void multiply_few(const Outputs<Format, T>& outputs, const typename Format::Input* x, int64_t num_tokens,
                  int threads) {
  const PackedMatrix<Format>& weight = outputs.weight;
  const int64_t num_panels = weight.count(), num_tasks = (num_panels + TASK_PANELS - 1) / TASK_PANELS;
  parallel_for(num_tasks, threads, [&](auto& next) {
    for (int64_t task; (task = next()) < num_tasks;) {
      const int64_t first = task * TASK_PANELS, count = std::min(TASK_PANELS, num_panels - first);
      float sums[MAX_TILE_TOKENS * TASK_PANELS * PANEL_LEN] = {};
      with_count(num_tokens, [&](auto m) { add_panels<Format, m()>(x, weight, first, count, sums); });
      for (int64_t i = 0; i < count; i++)
        outputs.write(first + i, sums + i * PANEL_LEN, TASK_PANELS * PANEL_LEN, num_tokens);
    }
  });
}

// The tokens of a chunk in groups, which are the rows of tiles. Their lengths differ by one at most: a tile of the one or
// two tokens that are left over would have too few accumulators to hide the latency of an addition.
struct Groups {
  int64_t num_tokens, count, quotient, remainder;

  Groups(int64_t tokens, int64_t max_len)
      : num_tokens(tokens),
        count((tokens + max_len - 1) / max_len),
        quotient(tokens / count),
        remainder(tokens % count) {}

  int64_t begin(int64_t group) const { return group * quotient + std::min(group, remainder); }
  int64_t size(int64_t group) const { return quotient + (group < remainder); }
};

// packed [K / INPUTS, M, INPUTS] = x [M, K].
template <int INPUTS, int M, typename Input, typename T>
void pack_tokens(const T* x, int64_t in_features, Input* packed) {
  for (int64_t k = 0; k < in_features; k += INPUTS)
    for (int m = 0; m < M; m++)
      for (int i = 0; i < INPUTS; i++)
        if constexpr (std::is_same_v<T, Input>)
          *packed++ = x[m * in_features + k + i];
        else
          store_one(packed++, to_float(x[m * in_features + k + i]));
}

// Rows of a panel as tiles multiply them: in place, or widened to float32 once for all tokens of a chunk.
template <typename Format, bool IS_WIDENED>
struct Block {
  static constexpr int64_t MAX_INPUTS = IS_WIDENED ? WIDENED_INPUTS : BLOCK_INPUTS;
  using Tile = std::conditional_t<IS_WIDENED, F32, Format>;

  float widened[IS_WIDENED ? WIDENED_INPUTS * PANEL_LEN : 1];

  const typename Tile::Number* read(const typename Format::Number* rows, int64_t num_inputs) {
    if constexpr (!IS_WIDENED) {
      return rows;
    } else {
      for (int64_t k = 0; k < num_inputs; k++)
        for (int i = 0; i < PANEL_VECTORS; i++) {
          const int64_t row = k / Format::STEPS;
          const auto* numbers = rows + (row * PANEL_LEN + i * LANES) * Format::STEPS;
          store(widened + k * PANEL_LEN + i * LANES, Format::columns(numbers, k % Format::STEPS));
        }
      return widened;
    }
  }
};

// Memory of the calling thread. It keeps the largest size that was requested.
template <typename Number>
Number* scratch(int64_t count) {
  thread_local std::unique_ptr<Number[]> memory;
  thread_local int64_t capacity = 0;
  if (count > capacity) {
    memory.reset();
    memory.reset(new Number[count]);
    capacity = count;
  }
  return memory.get();
}

// Adds the product of some inputs of a panel and all tokens to sums [T, PANEL_LEN], and prefetches num_ahead bytes.
template <typename Tile, bool IS_PACKED>
void add_block(const typename Tile::Number* rows, const typename Tile::Input* tokens, int64_t in_features,
               int64_t first, int64_t num_inputs, const Groups& groups, float* sums, const void* ahead,
               int64_t num_ahead) {
  const int64_t num_rows = num_inputs / ROW_INPUTS<Tile>, step = num_ahead / (num_rows * groups.count);
  for (int64_t group = 0; group < groups.count; group++) {
    const int64_t begin = groups.begin(group), size = groups.size(group);
    const auto* inputs = tokens + begin * in_features + first * (IS_PACKED ? size : 1);
    const Ahead own{(const char*)ahead + group * num_rows * step, step};
    with_count(size, [&](auto m) {
      add_tile<Tile, m(), 1, IS_PACKED, AHEAD_LINES>(inputs, in_features, rows, 0, num_rows, sums + begin * PANEL_LEN,
                                                     PANEL_LEN, own);
    });
  }
}

// Returns the numbers that a thread probably reads after the inputs below `end` of a panel: threads work in ranges of
// adjacent panels (thread_pool.h, Interleaving). Returns null after the last panel.
template <typename Format, typename Result>
const typename Format::Number* next_block(const Result& outputs, int64_t panel, int part, int64_t end) {
  const PackedMatrix<Format>& weight = outputs.weight;
  const int64_t num_panels = outputs.num_panels();
  if (end < weight.in_features) return weight.data + (part * num_panels + panel) * weight.stride + end * PANEL_LEN;
  if (part + 1 < Result::PARTS) return weight.data + ((part + 1) * num_panels + panel) * weight.stride;
  return panel + 1 < num_panels ? weight.data + (panel + 1) * weight.stride : nullptr;
}

// Returns x [T, K] with the tokens of each group packed, in memory of this thread.
template <typename Tile, typename T>
const typename Tile::Input* pack_groups(const T* x, int64_t in_features, const Groups& groups, int threads) {
  using Input = typename Tile::Input;
  Input* packed = scratch<Input>(groups.num_tokens * in_features);
  parallel_for(groups.count, threads, [&](auto& next) {
    for (int64_t group; (group = next()) < groups.count;) {
      const int64_t begin = groups.begin(group) * in_features;
      with_count(groups.size(group),
                 [&](auto m) { pack_tokens<ROW_INPUTS<Tile>, m()>(x + begin, in_features, packed + begin); });
    }
  });
  return packed;
}

// The product for at most CHUNK_TOKENS tokens.
template <typename Format, bool IS_WIDENED, typename Result, typename T>
void multiply_chunk(const Result& outputs, const T* x, int64_t num_tokens, int threads) {
  using Rows = Block<Format, IS_WIDENED>;
  using Tile = typename Rows::Tile;
  using Input = typename Tile::Input;
  constexpr bool IS_PACKED = PACKS_TOKENS || !std::is_same_v<T, Input>;
  constexpr int64_t MAX_INPUTS = Rows::MAX_INPUTS;
  const PackedMatrix<Format>& weight = outputs.weight;
  const int64_t in_features = weight.in_features, num_panels = outputs.num_panels();
  const Groups groups(num_tokens, Tile::STEPS > 1 ? MAX_WIDENING_TILE_TOKENS : MAX_TILE_TOKENS);
  const Input* tokens;
  if constexpr (IS_PACKED)
    tokens = pack_groups<Tile>(x, in_features, groups, threads);
  else
    tokens = x;
  parallel_for(num_panels, threads, [&](auto& next) {
    Rows block;
    float sums[Result::PARTS * CHUNK_TOKENS * PANEL_LEN];
    const int64_t num_sums = num_tokens * PANEL_LEN;
    for (int64_t panel; (panel = next()) < num_panels;) {
      memset(sums, 0, Result::PARTS * num_sums * sizeof(float));
      for (int part = 0; part < Result::PARTS; part++) {
        const auto* numbers = weight.data + (part * num_panels + panel) * weight.stride;
        for (int64_t first = 0; first < in_features; first += MAX_INPUTS) {
          const int64_t num_inputs = std::min(MAX_INPUTS, in_features - first);
          const auto* rows = block.read(numbers + first * PANEL_LEN, num_inputs);
          const auto* next = next_block<Format>(outputs, panel, part, first + num_inputs);
          const int64_t num_bytes = num_inputs * PANEL_LEN * int64_t(sizeof(*next));
          add_block<Tile, IS_PACKED>(rows, tokens, in_features, first, num_inputs, groups, sums + part * num_sums,
                                     next ? (const void*)next : rows, next ? std::min(num_bytes, MAX_AHEAD_BYTES) : 0);
        }
      }
      outputs.write(panel, sums, PANEL_LEN, num_tokens);
    }
  });
}

// The product for more than MAX_TILE_TOKENS tokens.
template <typename Format, typename Result, typename T>
void multiply_many(const Result& outputs, const T* x, int64_t num_tokens, int threads) {
  const int64_t num_chunks = (num_tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
  int64_t chunk_len = (num_tokens + num_chunks - 1) / num_chunks;
  chunk_len = (chunk_len + MAX_TILE_TOKENS - 1) / MAX_TILE_TOKENS * MAX_TILE_TOKENS;
  const auto multiply = num_tokens > MAX_UNWIDENED_TOKENS ? multiply_chunk<Format, IS_CONVERTED<Format>, Result, T>
                                                          : multiply_chunk<Format, false, Result, T>;
  for (int64_t begin = 0; begin < num_tokens; begin += chunk_len)
    multiply(outputs.from(begin), x + begin * outputs.weight.in_features, std::min(chunk_len, num_tokens - begin),
             threads);
}

#if defined(QUIRE_HAS_TILES)
// Weights that tile registers multiply. One in int8 is widened to bfloat16, which is exact; its tokens are not rounded.
template <typename Format, typename T>
constexpr bool USES_TILES = std::is_same_v<Format, BF16> || (std::is_same_v<Format, I8> && std::is_same_v<T, bf16>);

// Tokens that read the weight from memory together.
constexpr int64_t TILED_TOKENS = 256;
constexpr int64_t TILED_INPUTS = 512;

// Rows of a panel in bfloat16: in place, or widened once for all tokens of a chunk.
template <typename Format>
struct TileBlock {
  const bf16* read(const bf16* rows, int64_t) { return rows; }
};

template <>
struct TileBlock<I8> {
  alignas(64) bf16 widened[TILED_INPUTS * PANEL_LEN];

  const bf16* read(const int8_t* rows, int64_t num_inputs) {
    for (int64_t row = 0; row < num_inputs / 4; row++)
      for (int i = 0; i < PANEL_VECTORS; i++) {
        const int8_t* fours = rows + (row * PANEL_LEN + i * LANES) * 4;
        BitVec inputs[4];
        for (int step = 0; step < 4; step++) {
          const Vec wide = I8::columns(fours, step);
          memcpy(&inputs[step], &wide, sizeof wide);
        }
        for (int pair = 0; pair < 2; pair++) {
          const BitVec both = inputs[2 * pair] >> 16 | inputs[2 * pair + 1];
          memcpy(widened + ((2 * row + pair) * PANEL_LEN + i * LANES) * 2, &both, sizeof both);
        }
      }
    return widened;
  }
};

// The product for at most TILED_TOKENS tokens.
template <typename Format, typename Result>
void multiply_tiled_chunk(const Result& outputs, const bf16* x, int64_t num_tokens, int threads) {
  constexpr bool IS_WIDENED = !std::is_same_v<Format, BF16>;
  const PackedMatrix<Format>& weight = outputs.weight;
  const int64_t in_features = weight.in_features, num_panels = outputs.num_panels();
  const int64_t block_len = IS_WIDENED || num_tokens > GROUP_TOKENS ? TILED_INPUTS : in_features;
  parallel_for(num_panels, threads, [&](auto& next) {
    TileRegisters registers;
    TileBlock<Format> block;
    alignas(64) float sums[Result::PARTS * TILED_TOKENS * PANEL_LEN];
    for (int64_t panel; (panel = next()) < num_panels;) {
      for (int part = 0; part < Result::PARTS; part++) {
        float* own = sums + part * num_tokens * PANEL_LEN;
        const auto* numbers = weight.data + (part * num_panels + panel) * weight.stride;
        for (int64_t first = 0; first < in_features; first += block_len) {
          const int64_t num_inputs = std::min(block_len, in_features - first);
          const bf16* rows = block.read(numbers + first * PANEL_LEN, num_inputs);
          const auto* next = next_block<Format>(outputs, panel, part, first + num_inputs);
          const int64_t num_bytes = std::min<int64_t>(MAX_AHEAD_BYTES, num_inputs * PANEL_LEN * sizeof(*next));
          (first ? add_tokens<true> : add_tokens<false>)(registers, x + first, in_features, num_tokens, rows,
                                                         num_inputs, own, !IS_WIDENED, (const char*)next,
                                                         next ? num_bytes : 0);
        }
      }
      outputs.write(panel, sums, PANEL_LEN, num_tokens);
    }
  });
}

// Returns x [T, K] in bfloat16.
inline const bf16* rounded_tokens(const bf16* x, int64_t, int64_t, int) { return x; }

inline const bf16* rounded_tokens(const float* x, int64_t num_tokens, int64_t in_features, int threads) {
  bf16* rounded = scratch<bf16>(num_tokens * in_features);
  const int64_t step = num_tokens * in_features < 16384 ? num_tokens : 1;
  parallel_for((num_tokens + step - 1) / step, threads, [&](auto& next) {
    for (int64_t t; (t = next() * step) < num_tokens;) {
      convert(x + t * in_features, rounded + t * in_features, step * in_features);
    }
  });
  return rounded;
}

// The product for any number of tokens.
template <typename Format, typename Result, typename T>
void multiply_tiled(const Result& outputs, const T* x, int64_t num_tokens, int threads) {
  const bf16* inputs = rounded_tokens(x, num_tokens, outputs.weight.in_features, threads);
  const int64_t num_chunks = (num_tokens + TILED_TOKENS - 1) / TILED_TOKENS;
  int64_t chunk_len = num_chunks ? (num_tokens + num_chunks - 1) / num_chunks : 1;
  chunk_len = (chunk_len + GROUP_TOKENS - 1) / GROUP_TOKENS * GROUP_TOKENS;
  for (int64_t begin = 0; begin < num_tokens; begin += chunk_len)
    multiply_tiled_chunk<Format>(outputs.from(begin), inputs + begin * outputs.weight.in_features,
                                 std::min(chunk_len, num_tokens - begin), threads);
}
#else
template <typename Format, typename T>
constexpr bool USES_TILES = false;

template <typename Format, typename Result, typename T>
void multiply_tiled(const Result&, const T*, int64_t, int) {}
#endif

// y [T, N] = x [T, K] times the transpose of the weight, plus bias [N] unless that is null.
template <typename Format, typename T>
void linear(const PackedMatrix<Format>& weight, const T* x, const T* bias, T* y, int64_t y_stride, int64_t num_tokens,
            int threads) {
  const Outputs<Format, T> outputs{weight, bias, y, y_stride};
  if constexpr (USES_TILES<Format, T>) {
    multiply_tiled<Format>(outputs, x, num_tokens, threads);
  } else if (num_tokens > MAX_TILE_TOKENS) {
    multiply_many<Format>(outputs, x, num_tokens, threads);
  } else if constexpr (std::is_same_v<T, typename Format::Input>) {
    multiply_few(outputs, x, num_tokens, threads);
  } else {
    using Input = typename Format::Input;
    const int64_t count = num_tokens * weight.in_features;
    Input* converted = scratch<Input>(count);
    convert(x, converted, count);
    multiply_few(outputs, converted, num_tokens, threads);
  }
}

// y [T, N / 2] = gated activation of the linear layer's outputs. N / 2 is a multiple of PANEL_LEN.
template <typename Format, typename T>
void gated_linear(const PackedMatrix<Format>& weight, Gate gate, const T* x, const T* bias, T* y, int64_t num_tokens,
                  int threads) {
  if constexpr (USES_TILES<Format, T>) {
    multiply_tiled<Format>(GatedOutputs<Format, T>{weight, bias, y, gate}, x, num_tokens, threads);
  } else if (num_tokens > MAX_TILE_TOKENS) {
    multiply_many<Format>(GatedOutputs<Format, T>{weight, bias, y, gate}, x, num_tokens, threads);
  } else {
    T* gate_up = scratch<T>(num_tokens * weight.out_features);  // converted tokens are of another type than T
    linear(weight, x, bias, gate_up, weight.out_features, num_tokens, threads);
    quire_gate_and_mul(DTYPE_OF<T>, gate, gate_up, y, num_tokens,
                       weight.out_features / 2, threads);
  }
}

// out [T, K]: rows `ids` [T] of the weight.
template <typename Format, typename T>
void gather_rows(const PackedMatrix<Format>& weight, const int64_t* ids, T* out, int64_t count, int threads) {
  constexpr int INPUTS = ROW_INPUTS<Format>;
  parallel_for(count, count * weight.in_features < 16384 ? 1 : threads, [&](auto& next) {
    for (int64_t t; (t = next()) < count;) {
      const auto* column = weight.data + ids[t] / PANEL_LEN * weight.stride + ids[t] % PANEL_LEN * INPUTS;
      const float scale = weight.scales ? weight.scales[ids[t]] : 1.f;
      for (int64_t k = 0; k < weight.in_features; k++) {
        const auto number = column[k / INPUTS * PANEL_LEN * INPUTS + k % INPUTS];
        store_one(out + t * weight.in_features + k, Format::widen(number) * scale);
      }
    }
  });
}

// Calls body(format) with the format of a weight dtype: float32, bfloat16, float16 or int8.
template <typename Body>
void for_format(int weight_dtype, const Body& body) {
  if (weight_dtype == FLOAT32)
    body(F32{});
  else if (weight_dtype == BFLOAT16)
    body(BF16{});
  else if (weight_dtype == FLOAT16)
    body(F16{});
  else
    body(I8{});
}

// Calls body(weight, T{}) with the weight's format and the tokens' type.
template <typename Body>
void for_types(int weight_dtype, int dtype, const void* matrix, const float* scales, int64_t in_features,
               int64_t out_features, int64_t stride, const Body& body) {
  for_format(weight_dtype, [&](auto format) {
    using Format = decltype(format);
    using Number = typename Format::Number;
    const PackedMatrix<Format> weight{(const Number*)matrix, stride, in_features, out_features, scales};
    with_dtype(dtype, [&](auto t) {
      if constexpr (std::is_same_v<Number, decltype(t)> || std::is_same_v<Number, int8_t>) body(weight, t);
    });
  });
}

}  // namespace

extern "C" {

// `dtype` is that of x, bias and y: that of the weight, any for a weight in int8, or float32 for one in bfloat16, which
// rounds the tokens where the processor multiplies bfloat16 numbers.
void quire_linear(int weight_dtype, int dtype, const void* x, const void* matrix, const float* scales, const void* bias,
                  void* y, int64_t num_tokens, int64_t in_features, int64_t out_features, int64_t panel_stride,
                  int threads) {
  if (weight_dtype == BFLOAT16 && dtype == FLOAT32) {
    const PackedMatrix<BF16> weight{(const bf16*)matrix, panel_stride, in_features, out_features, scales};
    linear(weight, (const float*)x, (const float*)bias, (float*)y, out_features, num_tokens, threads);
    return;
  }
  for_types(weight_dtype, dtype, matrix, scales, in_features, out_features, panel_stride, [&](auto& weight, auto t) {
    using T = decltype(t);
    linear(weight, (const T*)x, (const T*)bias, (T*)y, out_features, num_tokens, threads);
  });
}

// As quire_linear on one thread, for panels of a weight: the results are `out_features` columns of y, whose rows are
// y_stride numbers apart.
void quire_linear_columns(int weight_dtype, int dtype, const void* x, const void* matrix, const float* scales,
                          const void* bias, void* y, int64_t y_stride, int64_t num_tokens, int64_t in_features,
                          int64_t out_features, int64_t panel_stride) {
  for_types(weight_dtype, dtype, matrix, scales, in_features, out_features, panel_stride, [&](auto& weight, auto t) {
    using T = decltype(t);
    linear(weight, (const T*)x, (const T*)bias, (T*)y, y_stride, num_tokens, 1);
  });
}

// y [T, H, N] = x [T, H, K] times the transpose of each head's weight [N, K], in the dtype of x. Tokens of x are x_stride
// numbers apart, and heads head_stride. Each head has whole panels.
void quire_linear_heads(int dtype, const void* x, const void* matrix, void* y, int64_t num_tokens, int64_t num_heads,
                        int64_t x_stride, int64_t head_stride, int64_t in_features, int64_t out_features,
                        int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    using Format = FormatOf<T>;
    const int64_t panel_stride = PANEL_LEN * in_features;
    const int64_t weight_stride = (out_features + PANEL_LEN - 1) / PANEL_LEN * panel_stride;
    parallel_for(num_heads, threads, [&](auto& next) {
      std::unique_ptr<T[]> inputs(new T[num_tokens * in_features]);
      for (int64_t head; (head = next()) < num_heads;) {
        const T* from = (const T*)x + head * head_stride;
        for (int64_t i = 0; i < num_tokens; i++)
          memcpy(&inputs[i * in_features], from + i * x_stride, in_features * sizeof(T));
        const auto* numbers = (const typename Format::Number*)matrix + head * weight_stride;
        const PackedMatrix<Format> weight{numbers, panel_stride, in_features, out_features, nullptr};
        linear(weight, (const T*)inputs.get(), (const T*)nullptr, (T*)y + head * out_features, num_heads * out_features,
               num_tokens, 1);
      }
    });
  });
}

// As quire_linear, followed by quire_gate_and_mul. Half of out_features is a multiple of PANEL_LEN.
void quire_gated_linear(int weight_dtype, int dtype, int gate, const void* x, const void* matrix, const float* scales,
                        const void* bias, void* y, int64_t num_tokens, int64_t in_features, int64_t out_features,
                        int64_t panel_stride, int threads) {
  if (weight_dtype == BFLOAT16 && dtype == FLOAT32) {
    const PackedMatrix<BF16> weight{(const bf16*)matrix, panel_stride, in_features, out_features, scales};
    gated_linear(weight, Gate(gate), (const float*)x, (const float*)bias, (float*)y, num_tokens, threads);
    return;
  }
  for_types(weight_dtype, dtype, matrix, scales, in_features, out_features, panel_stride, [&](auto& weight, auto t) {
    using T = decltype(t);
    gated_linear(weight, Gate(gate), (const T*)x, (const T*)bias, (T*)y, num_tokens, threads);
  });
}

void quire_gather_rows(int weight_dtype, int dtype, const void* matrix, const float* scales, const int64_t* ids,
                       void* out, int64_t count, int64_t in_features, int64_t panel_stride, int threads) {
  for_format(weight_dtype, [&](auto format) {
    using Format = decltype(format);
    const PackedMatrix<Format> weight{(const typename Format::Number*)matrix, panel_stride, in_features, 0, scales};
    with_dtype(dtype, [&](auto t) { gather_rows(weight, ids, (decltype(t)*)out, count, threads); });
  });
}
}
