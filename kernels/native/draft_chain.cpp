// A chain of drafted tokens in one call: each is sampled from a small network that computes the token before it.
//
// The ops are those that Python would call one by one (worker/speculation/draft_chain.py), with the same results. With
// a head of one layer for the demo model, Python takes 500 us per drafted token and this call 90.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "decode_layers.h"
#include "simd.h"

// The way in which a network reads the embedding of a token and a hidden state.
enum Merge : int64_t {
  EMBEDDING,  // the embedding alone: a model
  BESIDE,     // the attention of the one layer reads both side by side: EAGLE-3
  PROJECTED,  // a projection of both side by side is the input of the layers: multi-token prediction
};

// Cosines and sines of all positions, [P, 2, R].
struct RotaryTable {
  const char* data;
  int64_t rotated_dim;
};

// Python fills this struct: kernels/native/draft_chain.py declares the same fields in the same order.
struct Network {
  Linear combination;          // [E, F], of the target's hidden states; if it is not packed, these are taken as they are
  Linear embedding;            // [V, E]; if it is not packed, it is embedding_rows
  Linear projection;           // [E, 2 E], of a PROJECTED network
  Linear output;               // [V', E]
  const char* embedding_rows;  // [V, E]
  const Layer* layers;
  const RotaryTable* ropes;
  const void *embedding_norm, *hidden_norm;  // [E]
  const void* last_norm;                     // [E]
  const int64_t* output_ids;                 // [V'], token of each output; null: its index
  int64_t num_layers, num_ropes, hidden_size, vocab_size, merge;
  int64_t is_hidden_first;     // of the two side by side
  int64_t is_normed_residual;  // of a BESIDE network: the residual is the normalized hidden state
  int64_t feeds_normed;        // the last norm is applied before a hidden state is fed back, otherwise before the output
  float eps, embedding_scale;
};

// Rows of the running sequences, and their sampling parameters.
struct Rows {
  int32_t* token_ids;           // [R, max_len]
  const int32_t* block_tables;  // [R, M]
  const bool* greedy;           // [R]
  const float* temperature;     // [R]
  const int64_t* top_k;         // [R]; at least the vocabulary: off
  const float *top_p, *min_p;   // [R]; above 1, and 0: off
  const int64_t* seeds;         // [R]
  int64_t token_stride, table_stride, block_size;
  int64_t token_offset;  // places by which the tokens of the network's inputs follow their positions
};

namespace {

struct Inputs {
  std::vector<int32_t> rows;
  std::vector<int64_t> positions;

  int64_t size() const { return int64_t(rows.size()); }

  void add(int32_t row, int64_t position) {
    rows.push_back(row);
    positions.push_back(position);
  }
};

// Memory that one thread uses again in each step.
struct Buffer {
  std::vector<char> bytes;

  template <typename T = char>
  T* resize(int64_t count) {
    if (int64_t(bytes.size()) < count * int64_t(sizeof(T))) bytes.resize(count * sizeof(T));
    return (T*)bytes.data();
  }
};

// The halves of the key of a row's noise; see random_keys in kernels/gumbel.py.
uint64_t random_key(int64_t seed, int64_t position) {
  uint64_t x = uint64_t(seed) + uint64_t(position + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

template <typename T>
void add(T* to, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store(to + i, load(to + i) + load(x + i));
}

class Chain {
 public:
  Chain(const Network& network, const Rows& rows, int dtype, int threads)
      : net_(network), rows_(rows), dtype_(dtype), threads_(threads), length_(network.hidden_size) {}

  // Computes the network for inputs; hidden [T, E] is read, unless it reads none, and replaced by its own.
  void compute(const Inputs& inputs, char* hidden) {
    const int64_t count = inputs.size();
    const Step step = prepare(inputs);
    char* x = x_.resize(bytes(count * length_));
    char* residual = residual_.resize(bytes(count * length_));
    embed(inputs, net_.merge == EMBEDDING ? residual : x);
    if (net_.merge == BESIDE) {
      beside(step, x, residual, hidden);
      memcpy(hidden, residual, bytes(count * length_));
      return;
    }
    if (net_.merge == PROJECTED) {
      char* both = merge(step, x, hidden);
      multiply(net_.projection, both, residual, step);
    }
    const int64_t end = 2 * net_.num_layers + net_.feeds_normed;
    quire_decode_layers(net_.layers, net_.num_layers, net_.last_norm, 0, end, dtype_, count, step.rotations, step.slots,
                        step.tables, step.table_stride, step.lens, x, residual, nullptr, nullptr, 0,
                        scratch_.resize(bytes(count * scratch_len())), threads_, nullptr);
    if (net_.feeds_normed) {
      memcpy(hidden, x, bytes(count * length_));
    } else {
      const Layer& last = net_.layers[net_.num_layers - 1];
      finish(x, last.after_mlp, last, step);
      add_to(residual, x, count * length_);
      memcpy(hidden, residual, bytes(count * length_));
    }
  }

  // Combines rows `index` [T] of the target's hidden states [., F] to [T, E].
  void combine(const char* features, const int64_t* index, char* hidden, int64_t count) {
    Step step{};
    step.dtype = dtype_, step.num_tokens = count, step.threads = threads_;
    const int64_t size = bytes(net_.combination.matrix ? net_.combination.in_features : length_);
    char* gathered = net_.combination.matrix ? features_.resize(count * size) : hidden;
    for (int64_t i = 0; i < count; i++) memcpy(gathered + i * size, features + index[i] * size, size);
    if (net_.combination.matrix) multiply(net_.combination, gathered, hidden, step);
  }

  // Samples a token for each hidden state, and writes it to its row and position.
  void sample(const Inputs& places, const char* hidden) {
    const int64_t count = places.size(), num_outputs = net_.output.out_features;
    Step step{};
    step.dtype = dtype_, step.num_tokens = count, step.threads = threads_;
    if (!net_.feeds_normed) {
      char* normed = x_.resize(bytes(count * length_));
      normalize(hidden, net_.last_norm, normed, count, length_);
      hidden = normed;
    }
    char* outputs = outputs_.resize(bytes(count * num_outputs));
    multiply(net_.output, hidden, outputs, step);
    for (int64_t i = 0; i < count; i++) {
      const float* logits = logits_of(outputs + bytes(i * num_outputs));
      const int64_t position = places.positions[i];
      const int32_t row = places.rows[i];
      const float temperature = rows_.greedy[row] ? 0 : rows_.temperature[row];
      int32_t* token_id = rows_.token_ids + row * rows_.token_stride + position;
      float score;
      const uint64_t key = random_key(rows_.seeds[row], position);
      const uint32_t halves[2] = {uint32_t(key), uint32_t(key >> 32)};
      if (temperature > 0) {
        if (rows_.top_k[row] < net_.vocab_size || rows_.top_p[row] < 1 || rows_.min_p[row] > 0) {
          float* truncated = truncated_.resize<float>(net_.vocab_size);
          quire_truncate(logits, truncated, net_.vocab_size, temperature, rows_.top_k[row], rows_.top_p[row],
                         rows_.min_p[row]);
          logits = truncated;
        }
        quire_sample_full(logits, &temperature, halves, &score, token_id, nullptr, nullptr, 0, 1, net_.vocab_size,
                          net_.vocab_size, 0, 1);
      } else
        quire_sample_greedy(logits, &score, token_id, nullptr, nullptr, 0, 1, net_.vocab_size, net_.vocab_size, 0, 1);
    }
  }

 private:
  int64_t bytes(int64_t count) const { return count * itemsize(dtype_); }

  int64_t scratch_len() const {
    int64_t longest = 0;
    for (int64_t i = 0; i < net_.num_layers; i++) {
      const Layer& layer = net_.layers[i];
      const int64_t attention = layer.qkv.out_features + layer.output.in_features;
      const int64_t feed_forward = layer.gate_up.out_features + layer.down.in_features;
      longest = std::max(longest, layer.output.out_features + std::max(attention, feed_forward));
    }
    return longest;
  }

  // Gathers what the layers read of the inputs' rows and positions.
  Step prepare(const Inputs& inputs) {
    const int64_t count = inputs.size();
    const int64_t last = *std::max_element(inputs.positions.begin(), inputs.positions.end());
    const int64_t width = last / rows_.block_size + 1;
    slots_.resize(count), lens_.resize(count), tables_.resize(count * width);
    for (int64_t i = 0; i < count; i++) {
      const int32_t* table = rows_.block_tables + inputs.rows[i] * rows_.table_stride;
      const int64_t position = inputs.positions[i];
      slots_[i] = int64_t(table[position / rows_.block_size]) * rows_.block_size + position % rows_.block_size;
      lens_[i] = int32_t(position + 1);
      memcpy(&tables_[i * width], table, width * sizeof(int32_t));
    }
    rotations_.resize(net_.num_ropes), rotated_.resize(net_.num_ropes);
    for (int64_t i = 0; i < net_.num_ropes; i++) {
      const RotaryTable& rope = net_.ropes[i];
      const int64_t pair = bytes(2 * rope.rotated_dim);
      char* own = rotated_[i].resize(count * pair);
      for (int64_t t = 0; t < count; t++) memcpy(own + t * pair, rope.data + inputs.positions[t] * pair, pair);
      rotations_[i] = {own, own + bytes(rope.rotated_dim), rope.rotated_dim, 2 * rope.rotated_dim};
    }
    return {dtype_, count, rotations_.data(), slots_.data(), tables_.data(), width, lens_.data(), threads_};
  }

  void embed(const Inputs& inputs, char* out) {
    const int64_t count = inputs.size(), size = bytes(length_);
    ids_.resize(count);
    for (int64_t i = 0; i < count; i++)
      ids_[i] = rows_.token_ids[inputs.rows[i] * rows_.token_stride + inputs.positions[i] + rows_.token_offset];
    if (net_.embedding.matrix)
      quire_gather_rows(int(net_.embedding.dtype), dtype_, net_.embedding.matrix, net_.embedding.scales, ids_.data(),
                        out, count, length_, net_.embedding.stride, threads_);
    else
      for (int64_t i = 0; i < count; i++) memcpy(out + i * size, net_.embedding_rows + ids_[i] * size, size);
    if (net_.embedding_scale != 1.f) quire_scale(dtype_, out, net_.embedding_scale, count, length_, threads_);
    if (net_.merge == PROJECTED)  // the embedding at position 0 counts as zeros, as in training
      for (int64_t i = 0; i < count; i++)
        if (inputs.positions[i] == 0) memset(out + i * size, 0, size);
  }

  // Returns the normalized embeddings and hidden states side by side, [T, 2 E].
  char* merge(const Step& step, const char* embedded, const char* hidden) {
    const int64_t count = step.num_tokens, size = bytes(length_);
    char* both = both_.resize(2 * count * size);
    char* normed = normed_.resize(2 * count * size);
    normalize(embedded, net_.embedding_norm, normed, count, length_);
    normalize(hidden, net_.hidden_norm, normed + count * size, count, length_);
    const int64_t first = net_.is_hidden_first ? size : 0;
    for (int64_t t = 0; t < count; t++) {
      memcpy(both + 2 * t * size + first, normed + t * size, size);
      memcpy(both + 2 * t * size + size - first, normed + (count + t) * size, size);
    }
    return both;
  }

  // Computes the one layer of a BESIDE network; its output is in `residual`.
  void beside(const Step& step, char* x, char* residual, const char* hidden) {
    const int64_t count = step.num_tokens, size = bytes(length_);
    const Layer& layer = net_.layers[0];
    const char* both = merge(step, x, hidden);
    memcpy(residual, net_.is_normed_residual ? normed_.bytes.data() + count * size : hidden, count * size);
    Scratch memory{scratch_.resize(bytes(count * scratch_len()))};
    char* normed = memory.allocate(count * length_, dtype_);
    attend(layer, step, both, x, memory);
    quire_add_rms_norm(dtype_, x, residual, layer.before_mlp, normed, count, length_, net_.eps, threads_);
    feed_forward(layer, step, normed, x, memory);
    add_to(residual, x, count * length_);
  }

  void normalize(const char* x, const void* weight, char* out, int64_t count, int64_t length) {
    quire_rms_norm(dtype_, x, weight, out, 1, count, 0, length, 0, length, net_.eps, threads_);
  }

  void add_to(char* to, const char* x, int64_t count) {
    with_dtype(dtype_, [&](auto t) { add((decltype(t)*)to, (const decltype(t)*)x, count); });
  }

  // The float32 logits [V] of the network's outputs [V'].
  const float* logits_of(const char* outputs) {
    const int64_t count = net_.output.out_features;
    if (dtype_ == FLOAT32 && !net_.output_ids) return (const float*)outputs;
    float* logits = logits_.resize<float>(net_.vocab_size);
    if (net_.output_ids) std::fill_n(logits, net_.vocab_size, -INFINITY);
    with_dtype(dtype_, [&](auto t) {
      for (int64_t i = 0; i < count; i++)
        logits[net_.output_ids ? net_.output_ids[i] : i] = to_float(((const decltype(t)*)outputs)[i]);
    });
    return logits;
  }

  const Network& net_;
  const Rows& rows_;
  const int dtype_, threads_;
  const int64_t length_;
  std::vector<int64_t> slots_, ids_;
  std::vector<int32_t> tables_, lens_;
  std::vector<Rotation> rotations_;
  std::vector<Buffer> rotated_;
  Buffer features_, x_, residual_, both_, normed_, scratch_, outputs_, logits_, truncated_;
};

}  // namespace

extern "C" {

int64_t quire_draft_network_bytes() { return sizeof(Network); }

// Drafts limits[i] tokens of sequence i, none if that is 0, and writes them to its row from position lens[i] on.
//
// First the network computes the counts[i] inputs of each sequence before that position, with rows feature_index of the
// target's hidden states `features` [., F], one for each input. If `counts` is null, `hidden` [n, E] are the network's
// hidden states of the sequences' last inputs instead.
void quire_draft(const Network* network, const Rows* rows, int dtype, int64_t num_sequences,
                 const int32_t* sequence_rows, const int32_t* lens, const int32_t* limits, const int32_t* counts,
                 const void* features, const int64_t* feature_index, const void* hidden, int threads) {
  Chain chain(*network, *rows, dtype, threads);
  const int64_t size = network->hidden_size * itemsize(dtype);
  Inputs inputs;
  std::vector<int64_t> last(num_sequences);  // index of each sequence's hidden state
  for (int64_t i = 0; i < num_sequences; i++) {
    for (int32_t k = counts ? counts[i] : 0; k > 0; k--)
      inputs.add(sequence_rows[i], lens[i] - rows->token_offset - k);
    last[i] = counts ? inputs.size() - 1 : i;
  }
  std::vector<char> states(std::max(inputs.size(), num_sequences) * size);
  if (counts) {
    if (network->merge != EMBEDDING) chain.combine((const char*)features, feature_index, states.data(), inputs.size());
    chain.compute(inputs, states.data());
  } else {
    memcpy(states.data(), hidden, num_sequences * size);
  }
  std::vector<int64_t> drafting;
  for (int64_t i = 0; i < num_sequences; i++) {
    if (limits[i] < 1) continue;
    memmove(&states[drafting.size() * size], &states[last[i] * size], size);
    drafting.push_back(i);
  }
  for (int32_t place = 0; !drafting.empty(); place++) {
    Inputs sampled;
    for (int64_t sequence : drafting) sampled.add(sequence_rows[sequence], lens[sequence] + place);
    chain.sample(sampled, states.data());
    // Only sequences that draft another token need the hidden state of this one.
    Inputs computed;
    int64_t count = 0;
    for (size_t i = 0; i < drafting.size(); i++) {
      const int64_t sequence = drafting[i];
      if (limits[sequence] <= place + 1) continue;
      memmove(&states[count * size], &states[i * size], size);
      computed.add(sequence_rows[sequence], lens[sequence] + place - rows->token_offset);
      drafting[count++] = sequence;
    }
    drafting.resize(count);
    if (count) chain.compute(computed, states.data());
  }
}
}
