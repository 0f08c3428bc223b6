// Collectives of ranks on one host over a segment of shared memory. Each round has a slot a rank, in two sets that
// alternate: who writes a set again has seen every rank in the round between, so nobody reads the old one any more.
#include "futex.h"
#include "vector.h"

namespace {

constexpr int64_t LINE = 64;
constexpr int DONE = -1;
// Ranks come to most rounds of a step nearly together, and to be woken takes longer than that.
constexpr auto SPIN_TIME = std::chrono::microseconds(50);

enum Kind { GATHER = 0, SUM_F32 = 1, SUM_BF16 = 2 };

// A rank's line at the start of the segment.
struct alignas(LINE) Header {
  std::atomic<uint32_t> round;  // the last one whose slot is written
  std::atomic<uint32_t> has_left;
  std::atomic<uint32_t> sleepers;  // ranks that sleep until the next
};

bool has_written(const Header& header, uint32_t round) {
  return int32_t(header.round.load(std::memory_order_acquire) - round) >= 0;
}

// Waits for one rank's slot; false when it has left or the time is up.
bool await(Header& header, uint32_t round, std::chrono::steady_clock::time_point deadline) {
  while (!has_written(header, round)) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (header.has_left.load() || left <= left.zero()) return has_written(header, round);
    const uint32_t seen = header.round.load(std::memory_order_acquire);
    if (int32_t(seen - round) >= 0 || watch(header.round, seen, std::min<std::chrono::nanoseconds>(left, SPIN_TIME)))
      continue;
    header.sleepers.fetch_add(1);
    sleep_until_changed(header.round, seen, left);
    header.sleepers.fetch_sub(1);
  }
  return true;
}

// Adds the slots in the order of the ranks, so that every rank gets the same bits.
template <typename T>
void sum(const char* slots, int size, int64_t capacity, char* out, int64_t num_bytes) {
  const int64_t count = num_bytes / int64_t(sizeof(T));
  T* to = reinterpret_cast<T*>(out);
  auto slot = [&](int rank) { return reinterpret_cast<const T*>(slots + rank * capacity); };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    Vec total = load(slot(0) + i);
    for (int rank = 1; rank < size; rank++) total += load(slot(rank) + i);
    store(to + i, total);
  }
  if (i == count) return;
  T rest[LANES] = {};
  Vec total = {};
  for (int rank = 0; rank < size; rank++) {
    memcpy(rest, slot(rank) + i, (count - i) * sizeof(T));
    total = rank ? total + load(rest) : load(rest);
  }
  store(rest, total);
  memcpy(to + i, rest, (count - i) * sizeof(T));
}

}  // namespace

extern "C" {

// Bytes of a segment.
int64_t quire_shm_collective_bytes(int size, int64_t capacity) { return size * LINE + 2 * size * capacity; }

// One round: writes `in` to this rank's slot unless it did so before (`written`), waits for all ranks, and gathers
// or sums the slots into `out`, which may be `in`. Returns -1, or the rank that has not come in `wait_us`.
int quire_shm_collective(char* segment, int rank, int size, int64_t capacity, uint32_t round, int kind, const char* in,
                   char* out, int64_t num_bytes, int written, int64_t wait_us) {
  Header* headers = reinterpret_cast<Header*>(segment);
  char* slots = segment + size * LINE + (round & 1) * size * capacity;
  if (!written) {
    memcpy(slots + rank * capacity, in, num_bytes);
    headers[rank].round.store(round);
    if (headers[rank].sleepers.load()) wake(headers[rank].round);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(wait_us);
  for (int other = 0; other < size; other++)
    if (!await(headers[other], round, deadline)) return other;
  if (kind == SUM_F32)
    sum<float>(slots, size, capacity, out, num_bytes);
  else if (kind == SUM_BF16)
    sum<bf16>(slots, size, capacity, out, num_bytes);
  else
    for (int other = 0; other < size; other++) memcpy(out + other * num_bytes, slots + other * capacity, num_bytes);
  return DONE;
}

// Says that this rank writes no further round.
void quire_shm_collective_close(char* segment, int rank) {
  Header& header = reinterpret_cast<Header*>(segment)[rank];
  header.has_left.store(1);
  wake(header.round);
}
}
