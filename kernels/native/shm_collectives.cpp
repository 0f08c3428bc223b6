// Collectives and transfers of the ranks on one host over segments of shared memory.
//
// Collectives:
// Each round uses one slot per rank, in one of two alternating sets. A rank that writes to a set again has seen every
// rank in the round between, so no rank still reads the set's old contents.
//
// A transfer goes through a ring of bytes, which one rank writes and another one reads. The writer waits only while the
// ring is full.
#include <algorithm>
#include <cstring>

#include "constants.h"
#include "futex.h"
#include "simd.h"

namespace {

constexpr int64_t CACHE_LINE = 64;
constexpr int DONE = -1;
// Ranks arrive at most rounds of a step nearly together, in less time than it takes to wake a thread.
constexpr auto SPIN_TIME = std::chrono::microseconds(50);

// A rank's cache line at the start of the segment.
struct alignas(CACHE_LINE) Header {
  std::atomic<uint32_t> round;  // the last round whose slot is written
  std::atomic<uint32_t> is_closed;
  std::atomic<uint32_t> num_sleeping;  // ranks that sleep until this rank's next round
};

bool has_written(const Header& header, uint32_t round) {
  return int32_t(header.round.load(std::memory_order_acquire) - round) >= 0;
}

// Waits for one rank's slot. Returns false when the rank has closed or the deadline is over.
bool wait_for(Header& header, uint32_t round, std::chrono::steady_clock::time_point deadline) {
  while (!has_written(header, round)) {
    const auto time_left = deadline - std::chrono::steady_clock::now();
    if (header.is_closed.load() || time_left <= time_left.zero()) return has_written(header, round);
    const uint32_t seen = header.round.load(std::memory_order_acquire);
    if (int32_t(seen - round) >= 0 ||
        spin_until_changed(header.round, seen, std::min<std::chrono::nanoseconds>(time_left, SPIN_TIME)))
      continue;
    header.num_sleeping.fetch_add(1);
    sleep_until_changed(header.round, seen, time_left);
    header.num_sleeping.fetch_sub(1);
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

char* slots_of(char* segment, int size, int64_t capacity, uint32_t round) {
  return segment + size * CACHE_LINE + (round & 1) * size * capacity;
}

// Writes `in` to this rank's slot unless `is_written`, and waits for all ranks. Returns DONE, or the first rank that
// has not arrived within `timeout_us`.
int exchange(char* segment, int rank, int size, int64_t capacity, uint32_t round, const char* in, int64_t num_bytes,
             bool is_written, int64_t timeout_us) {
  Header* headers = reinterpret_cast<Header*>(segment);
  if (!is_written) {
    memcpy(slots_of(segment, size, capacity, round) + rank * capacity, in, num_bytes);
    headers[rank].round.store(round);
    if (headers[rank].num_sleeping.load()) wake_all(headers[rank].round);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  for (int other = 0; other < size; other++)
    if (!wait_for(headers[other], round, deadline)) return other;
  return DONE;
}

// One end of a ring, which alone changes it.
struct alignas(CACHE_LINE) RingEnd {
  std::atomic<uint64_t> num_bytes;  // written or read so far
  std::atomic<uint32_t> num_changes;
  std::atomic<uint32_t> num_sleeping;  // 1 while the other end sleeps until the next change
  std::atomic<uint32_t> is_closed;
};

// Its bytes, [capacity], follow it.
struct Ring {
  RingEnd writer, reader;
  char* data() { return reinterpret_cast<char*>(this + 1); }
};

// Bytes that are copied before the other end may see them: it copies them meanwhile.
constexpr int64_t PIECE = 1 << 18;

void advance(RingEnd& end, int64_t count) {
  end.num_bytes.fetch_add(count);
  end.num_changes.fetch_add(1);
  if (end.num_sleeping.load()) wake_all(end.num_changes);
}

// Waits until the end has moved on from `seen` bytes. Returns false when it has closed or the deadline is over.
bool wait_for_bytes(RingEnd& end, uint64_t seen, std::chrono::steady_clock::time_point deadline) {
  while (end.num_bytes.load() == seen) {
    const uint32_t changes = end.num_changes.load();
    if (end.num_bytes.load() != seen) break;
    const auto time_left = deadline - std::chrono::steady_clock::now();
    if (end.is_closed.load() || time_left <= time_left.zero()) return end.num_bytes.load() != seen;
    if (spin_until_changed(end.num_changes, changes, std::min<std::chrono::nanoseconds>(time_left, SPIN_TIME))) continue;
    end.num_sleeping.store(1);
    sleep_until_changed(end.num_changes, changes, time_left);
    end.num_sleeping.store(0);
  }
  return true;
}

// Copies between `bytes` and the ring until all are copied, the other end has closed or the deadline is over. Returns
// the bytes that were copied.
int64_t move_bytes(Ring& ring, bool is_write, int64_t capacity, char* bytes, int64_t num_bytes, int64_t timeout_us) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  RingEnd& own = is_write ? ring.writer : ring.reader;
  RingEnd& other = is_write ? ring.reader : ring.writer;
  int64_t done = 0;
  while (done < num_bytes) {
    const uint64_t at = own.num_bytes.load(), seen = other.num_bytes.load();
    const int64_t available = is_write ? capacity - int64_t(at - seen) : int64_t(seen - at);
    if (available == 0) {
      if (!wait_for_bytes(other, seen, deadline)) break;
      continue;
    }
    const int64_t offset = int64_t(at % uint64_t(capacity));
    const int64_t count = std::min({available, num_bytes - done, capacity - offset, PIECE});
    char* in_ring = ring.data() + offset;
    if (is_write)
      memcpy(in_ring, bytes + done, count);
    else
      memcpy(bytes + done, in_ring, count);
    advance(own, count);
    done += count;
  }
  return done;
}

}  // namespace

extern "C" {

// Bytes of a segment for `size` ranks with slots of `capacity` bytes.
int64_t quire_shm_segment_bytes(int size, int64_t capacity) { return size * CACHE_LINE + 2 * size * capacity; }

// Sums numbers over the ranks. `out` may be `in`. Returns -1, or the rank that has not arrived
// within `timeout_us`; the caller then calls again with `is_written` set.
int quire_shm_all_reduce(char* segment, int rank, int size, int64_t capacity, uint32_t round, int dtype,
                         const char* in, char* out, int64_t num_bytes, int is_written, int64_t timeout_us) {
  const int late = exchange(segment, rank, size, capacity, round, in, num_bytes, is_written, timeout_us);
  if (late != DONE) return late;
  const char* slots = slots_of(segment, size, capacity, round);
  with_dtype(dtype, [&](auto t) { sum<decltype(t)>(slots, size, capacity, out, num_bytes); });
  return DONE;
}

// Concatenates the ranks' bytes in `out` [size * num_bytes]; otherwise as quire_shm_all_reduce.
int quire_shm_all_gather(char* segment, int rank, int size, int64_t capacity, uint32_t round, const char* in,
                         char* out, int64_t num_bytes, int is_written, int64_t timeout_us) {
  const int late = exchange(segment, rank, size, capacity, round, in, num_bytes, is_written, timeout_us);
  if (late != DONE) return late;
  const char* slots = slots_of(segment, size, capacity, round);
  for (int other = 0; other < size; other++) memcpy(out + other * num_bytes, slots + other * capacity, num_bytes);
  return DONE;
}

// Announces that this rank writes no further round, which ends the waits of other ranks for it.
void quire_shm_close(char* segment, int rank) {
  Header& header = reinterpret_cast<Header*>(segment)[rank];
  header.is_closed.store(1);
  wake_all(header.round);
}

// Bytes of a ring, with its data.
int64_t quire_ring_bytes(int64_t capacity) { return int64_t(sizeof(Ring)) + capacity; }

// Writes bytes to a ring, or reads them from it, for at most `timeout_us`; returns how many were copied. Fewer mean that
// the other end is late or has closed. Only one thread may use an end.
int64_t quire_ring_move(char* ring, int is_write, int64_t capacity, char* bytes, int64_t num_bytes,
                        int64_t timeout_us) {
  return move_bytes(*reinterpret_cast<Ring*>(ring), is_write, capacity, bytes, num_bytes, timeout_us);
}

// Closes one end of a ring, which ends the waits of the other one.
void quire_ring_close(char* ring, int is_writer) {
  Ring& own = *reinterpret_cast<Ring*>(ring);
  RingEnd& end = is_writer ? own.writer : own.reader;
  end.is_closed.store(1);
  end.num_changes.fetch_add(1);
  wake_all(end.num_changes);
}
}
