// Suffix automaton of a sequence of tokens that grows at its end (Blumer et al., The smallest automaton recognizing the
// subwords of a text, 1985). kernels/suffix_automaton.py is the reference.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// States whose newest occurrence is updated per token, longest first. Their number is bounded, so that a token has
// bounded costs; states of shorter suffixes keep an older occurrence.
constexpr int MAX_UPDATES = 16;
constexpr int32_t NONE = -1, ROOT = 0;

struct State {
  int32_t link, len;  // suffix link, and length of the longest string of the state
  int32_t end;        // index of the last token of an occurrence
  int32_t first_edge;
};

struct Edge {
  int32_t source, token, target, next;
};

class SuffixAutomaton {
 public:
  SuffixAutomaton() : states{{NONE, 0, NONE, NONE}}, slots(64, NONE) {}

  void extend(int32_t token) {
    update_ends();
    const int32_t current = add_state(states[last].len + 1, int32_t(tokens.size()));
    tokens.push_back(token);
    int32_t at = last;
    for (; at != NONE && find(at, token) == NONE; at = states[at].link) add_edge(at, token, current);
    states[current].link = at == NONE ? ROOT : split(at, token);
    last = current;
  }

  // Writes up to `count` tokens that followed an earlier occurrence of the longest repeated suffix of `min_len` to
  // `max_len` tokens. Returns the length of that suffix; 0 if there is none.
  int64_t propose(int64_t count, int64_t min_len, int64_t max_len, int32_t* out) const {
    int32_t match = std::max(states[last].link, ROOT);
    while (match != ROOT && states[states[match].link].len >= max_len) match = states[match].link;
    const int64_t len = std::min<int64_t>(states[match].len, max_len), known = tokens.size();
    if (match == ROOT || len < min_len) return 0;
    const int64_t start = states[match].end + 1;
    // An occurrence that overlaps the end of the text continues with the proposed tokens themselves.
    for (int64_t i = 0; i < count; i++) out[i] = start + i < known ? tokens[start + i] : out[start + i - known];
    return len;
  }

 private:
  std::vector<State> states;
  std::vector<Edge> edges;
  std::vector<int32_t> tokens;
  std::vector<int32_t> slots;  // hash table of edges, by source and token
  int32_t last = ROOT;

  int32_t add_state(int32_t len, int32_t end) {
    states.push_back({NONE, len, end, NONE});
    return int32_t(states.size()) - 1;
  }

  // Makes the newest token the end of the suffixes that occur earlier as well.
  void update_ends() {
    int32_t at = states[last].link;
    for (int i = 0; i < MAX_UPDATES && at > ROOT; i++, at = states[at].link) states[at].end = states[last].end;
  }

  // Returns the state of the string that leads from `at` over `token`, alone: a new one if its state has longer strings.
  int32_t split(int32_t at, int32_t token) {
    const int32_t target = edges[find(at, token)].target;
    if (states[at].len + 1 == states[target].len) return target;
    const int32_t clone = add_state(states[at].len + 1, states[target].end);
    states[clone].link = states[target].link;
    for (int32_t edge = states[target].first_edge; edge != NONE; edge = edges[edge].next)
      add_edge(clone, edges[edge].token, edges[edge].target);
    for (int32_t edge; at != NONE && (edge = find(at, token)) != NONE && edges[edge].target == target;
         at = states[at].link)
      edges[edge].target = clone;
    states[target].link = clone;
    return clone;
  }

  void add_edge(int32_t source, int32_t token, int32_t target) {
    edges.push_back({source, token, target, states[source].first_edge});
    states[source].first_edge = int32_t(edges.size()) - 1;
    if (2 * edges.size() > slots.size()) {
      slots.assign(2 * slots.size(), NONE);
      for (size_t edge = 0; edge < edges.size(); edge++) *slot(edges[edge].source, edges[edge].token) = int32_t(edge);
    } else {
      *slot(source, token) = states[source].first_edge;
    }
  }

  int32_t find(int32_t source, int32_t token) { return *slot(source, token); }

  // Returns the place of an edge in the hash table.
  int32_t* slot(int32_t source, int32_t token) {
    uint64_t hash = (uint64_t(uint32_t(source)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
    for (size_t i = hash & (slots.size() - 1);; i = (i + 1) & (slots.size() - 1)) {
      const int32_t edge = slots[i];
      if (edge == NONE || (edges[edge].source == source && edges[edge].token == token)) return &slots[i];
    }
  }
};

}  // namespace

extern "C" {

void* quire_suffix_create() { return new SuffixAutomaton; }

void quire_suffix_destroy(void* automaton) { delete (SuffixAutomaton*)automaton; }

void quire_suffix_extend(void* automaton, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++) ((SuffixAutomaton*)automaton)->extend(tokens[i]);
}

int64_t quire_suffix_propose(const void* automaton, int64_t count, int64_t min_len, int64_t max_len, int32_t* out) {
  return ((const SuffixAutomaton*)automaton)->propose(count, min_len, max_len, out);
}
}
