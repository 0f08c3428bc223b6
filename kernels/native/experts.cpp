// The experts of a mixture over the tokens of a step, in one call.
//
// The tokens' choices are sorted by expert. A thread takes some outputs of one expert at a time, for all rows of that
// expert, so few tokens with many experts keep all threads busy and an expert's weights are read once. A token's results
// are added up in float32 in the order of its choices, so its sum does not depend on other tokens. Quantized weights are
// dequantized a panel at a time, which stays in the cache for its product.
#include "experts.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "matrix_tiles.h"
#include "packed_weights.h"
#include "thread_pool.h"

namespace {

// Rows of experts that are computed together, unless one expert has more: their intermediate results stay in the cache.
constexpr int64_t BATCH_ROWS = 1024;
// Panels per task for several rows: a task may pack its rows again, which takes a third of the time of one panel.
constexpr int64_t MIN_TASK_PANELS = 4;
constexpr int64_t TASKS_PER_THREAD = 8;
// Below this many elements, synchronizing threads costs more than they save.
constexpr int64_t MIN_PARALLEL = 16384;

// The choices of this rank's experts, by expert and then by token.
struct Choices {
  std::vector<int64_t> starts;     // [X + 1]: of each expert's rows
  std::vector<int64_t> tokens;     // row |-> token
  std::vector<float> factors;      // row |-> factor
  std::vector<int64_t> positions;  // choice |-> row, or -1 for an expert of another rank

  Choices(const Experts& own, const int64_t* expert_ids, const float* of_choices, int64_t num_tokens,
          int64_t per_token)
      : starts(own.count + 1), positions(num_tokens * per_token) {
    const int64_t num_choices = num_tokens * per_token;
    const auto local = [&](int64_t i) {
      const int64_t expert = expert_ids[i] - own.first;
      return expert >= 0 && expert < own.count ? expert : -1;
    };
    for (int64_t i = 0; i < num_choices; i++)
      if (local(i) >= 0) starts[local(i) + 1]++;
    for (int64_t x = 0; x < own.count; x++) starts[x + 1] += starts[x];
    tokens.resize(starts.back());
    factors.resize(starts.back());
    std::vector<int64_t> next(starts);
    for (int64_t i = 0; i < num_choices; i++) {
      positions[i] = local(i) < 0 ? -1 : next[local(i)]++;
      if (positions[i] < 0) continue;
      tokens[positions[i]] = i / per_token;
      factors[positions[i]] = of_choices[i];
    }
  }

  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// Consecutive experts with rows `begin` to `end`.
struct Batch {
  int64_t first, last, begin, end;  // the experts are those before `last`

  int64_t num_rows() const { return end - begin; }
};

// The next experts, from `first` on, with at most `capacity` rows.
Batch next_batch(const Choices& choices, int64_t first, int64_t num_experts, int64_t capacity) {
  int64_t last = first;
  while (last < num_experts && choices.starts[last + 1] - choices.starts[first] <= capacity) last++;
  return {first, last, choices.starts[first], choices.starts[last]};
}

// Some outputs of an expert, for all of its rows.
struct Task {
  int64_t expert, panel, num_panels;
};

// A weight of an expert.
struct Weight {
  const Linear& linear;
  const PackedQuantized* codes;

  int64_t num_panels() const { return (linear.out_features + PANEL_LEN - 1) / PANEL_LEN; }
};

// Memory of the calling thread, for a dequantized panel or widened tokens. It keeps the largest size that was requested.
char* task_scratch(int64_t bytes) {
  thread_local std::vector<char> memory;
  if (int64_t(memory.size()) < bytes) memory.resize(bytes);
  return memory.data();
}

// Returns x [count] in the type that multiply_quantized reads.
template <typename T>
const void* quantized_inputs(const T* x, int64_t count) {
  if constexpr (std::is_same_v<T, typename FormatOf<T>::Input>) {
    return x;
  } else {
    auto* widened = (float*)task_scratch(count * sizeof(float));
    convert(x, widened, count);
    return widened;
  }
}

// y [rows, N] = x [rows, K] times `count` panels of a weight, from `first` on.
template <typename T>
void multiply_panels(const Linear& weight, const void* panels, const T* x, T* y, int64_t rows, int64_t first,
                     int64_t count) {
  const int64_t output = first * PANEL_LEN;
  quire_linear_columns(int(weight.dtype), DTYPE_OF<T>, x, panels,
                       weight.scales ? weight.scales + output : nullptr,
                       weight.bias ? (const T*)weight.bias + output : nullptr, y + output, weight.out_features, rows,
                       weight.in_features, std::min(count * PANEL_LEN, weight.out_features - output), weight.stride);
}

template <typename T>
void multiply_task(const Weight& weight, const Task& task, const T* x, T* y, int64_t rows) {
  const Linear& linear = weight.linear;
  const int64_t panel_bytes = linear.stride * itemsize(int(linear.dtype));
  if (!weight.codes) {
    const auto* panels = (const char*)linear.matrix + task.panel * panel_bytes;
    return multiply_panels(linear, panels, x, y, rows, task.panel, task.num_panels);
  }
  // Tiles add in another order, so one row must not be computed without them.
  const bool uses_tiles = HAS_TILES && linear.dtype == BFLOAT16;
  if (rows <= MAX_QUANTIZED_TOKENS && !uses_tiles) {
    const void* inputs = quantized_inputs(x, rows * linear.in_features);
    for (int64_t i = task.panel; i < task.panel + task.num_panels; i++)
      multiply_quantized(*weight.codes, i, int(linear.dtype), inputs, rows, linear.bias, y);
    return;
  }
  char* panel = task_scratch(panel_bytes);
  for (int64_t i = task.panel; i < task.panel + task.num_panels; i++) {
    dequantize_panel(*weight.codes, i, int(linear.dtype), panel);
    multiply_panels(linear, panel, x, y, rows, i, 1);
  }
}

// Calls body(row) for rows of `length` elements.
template <typename Body>
void for_rows(int64_t rows, int64_t length, int threads, const Body& body) {
  parallel_for(rows, rows * length < MIN_PARALLEL ? 1 : threads, [&](auto& next) {
    for (int64_t row; (row = next()) < rows;) body(row);
  });
}

// y = rows of each expert of the batch times its weight. `get` returns the weight of an expert.
template <typename T, typename Get>
void multiply(const Choices& choices, const Batch& batch, const T* rows, T* y, int threads, const Get& get) {
  int64_t total = 0;
  for (int64_t x = batch.first; x < batch.last; x++)
    if (choices.count(x)) total += get(x).num_panels();
  std::vector<Task> tasks;
  for (int64_t x = batch.first; x < batch.last; x++) {
    if (!choices.count(x)) continue;
    const int64_t num_panels = get(x).num_panels();
    const int64_t least = choices.count(x) > 1 ? MIN_TASK_PANELS : 1;
    const int64_t step = std::max(least, total / (TASKS_PER_THREAD * threads));
    for (int64_t panel = 0; panel < num_panels; panel += step)
      tasks.push_back({x, panel, std::min(step, num_panels - panel)});
  }
  parallel_for(int64_t(tasks.size()), threads, [&](auto& next) {
    for (int64_t i; (i = next()) < int64_t(tasks.size());) {
      const Task& task = tasks[i];
      const Weight weight = get(task.expert);
      const int64_t row = choices.starts[task.expert] - batch.begin;
      multiply_task(weight, task, rows + row * weight.linear.in_features, y + row * weight.linear.out_features,
                    choices.count(task.expert));
    }
  });
}

template <typename T>
void activate_rows(const Experts& own, const T* gate_up, T* out, int64_t rows, int64_t length, int threads) {
  for_rows(rows, length, threads, [&](int64_t row) {
    T* to = out + row * length;
    if (own.gate == UNGATED_RELU_SQUARED) {
      for (int64_t i = 0; i < length; i++) {
        const float value = std::max(0.f, to_float(gate_up[row * length + i]));
        store_one(to + i, value * value);
      }
      return;
    }
    const T* from = gate_up + row * 2 * length;
    if (own.is_clamped)
      gate_row(from, to, length, Clamped{own.alpha, own.limit, own.offset});
    else if (own.gate == GELU_TANH)
      gate_row(from, to, length, [](Vec gate, Vec up) { return activate<GELU_TANH>(gate) * up; });
    else
      gate_row(from, to, length, [](Vec gate, Vec up) { return activate<SILU>(gate) * up; });
  });
}

// rows = the token of each row of the batch, times its factor if the experts scale their inputs.
template <typename T>
void gather(const Experts& own, const Choices& choices, const Batch& batch, const T* x, T* rows, int64_t length,
            int threads) {
  for_rows(batch.num_rows(), length, threads, [&](int64_t row) {
    const T* from = x + choices.tokens[batch.begin + row] * length;
    T* to = rows + row * length;
    if (!own.scales_inputs) {
      std::copy(from, from + length, to);
      return;
    }
    T rounded;
    store_one(&rounded, choices.factors[batch.begin + row]);
    const float factor = to_float(rounded);
    for (int64_t i = 0; i < length; i++) store_one(to + i, to_float(from[i]) * factor);
  });
}

// out [T, E] = the sum of each token's results [rows, E], times their factors.
template <typename T>
void add_up(const Experts& own, const Choices& choices, const float* factors, const T* results, T* out,
            int64_t num_tokens, int64_t per_token, int64_t length, int threads) {
  for_rows(num_tokens, per_token * length, threads, [&](int64_t token) {
    const int64_t* positions = choices.positions.data() + token * per_token;
    const auto add = [&](int64_t i, auto sum, const auto& read) {
      for (int64_t j = 0; j < per_token; j++)
        if (positions[j] >= 0)
          sum += read(results + positions[j] * length + i) * (own.scales_inputs ? 1.f : factors[token * per_token + j]);
      return sum;
    };
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES)
      store(out + token * length + i, add(i, Vec{}, [](const T* from) { return load(from); }));
    for (; i < length; i++)
      store_one(out + token * length + i, add(i, 0.f, [](const T* from) { return to_float(*from); }));
  });
}

template <typename T>
void run_experts(const Experts& own, const T* x, const float* factors, const int64_t* expert_ids, T* out,
                 int64_t num_tokens, int64_t per_token, int threads) {
  const Choices choices(own, expert_ids, factors, num_tokens, per_token);
  const int64_t length = own.experts[0].gate_up.in_features, inner_length = own.experts[0].down.in_features;
  int64_t capacity = BATCH_ROWS;
  for (int64_t i = 0; i < own.count; i++) capacity = std::max(capacity, choices.count(i));
  capacity = std::min(capacity, choices.starts.back());
  const std::unique_ptr<T[]> results(new T[choices.starts.back() * length]);
  const std::unique_ptr<T[]> rows(new T[capacity * length]);
  const std::unique_ptr<T[]> gate_up(new T[capacity * 2 * inner_length]), inner(new T[capacity * inner_length]);
  for (int64_t first = 0; first < own.count;) {
    const Batch batch = next_batch(choices, first, own.count, capacity);
    first = batch.last;
    if (!batch.num_rows()) continue;
    gather(own, choices, batch, x, rows.get(), length, threads);
    multiply(choices, batch, (const T*)rows.get(), gate_up.get(), threads,
             [&](int64_t i) { return Weight{own.experts[i].gate_up, own.experts[i].gate_up_codes}; });
    activate_rows(own, gate_up.get(), inner.get(), batch.num_rows(), inner_length, threads);
    multiply(choices, batch, (const T*)inner.get(), results.get() + batch.begin * length, threads,
             [&](int64_t i) { return Weight{own.experts[i].down, own.experts[i].down_codes}; });
  }
  add_up(own, choices, factors, results.get(), out, num_tokens, per_token, length, threads);
}

}  // namespace

extern "C" {

int64_t quire_experts_bytes() { return sizeof(Experts); }

// out [T, E]: the sum over this rank's experts among those that each token of x [T, E] chose, expert_ids [T, per_token],
// times factors [T, per_token]. `dtype` is that of x, out and the biases.
void quire_experts(const Experts* own, int dtype, const void* x, const float* factors, const int64_t* expert_ids,
                   void* out, int64_t num_tokens, int64_t per_token, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    run_experts(*own, (const T*)x, factors, expert_ids, (T*)out, num_tokens, per_token, threads);
  });
}
}
