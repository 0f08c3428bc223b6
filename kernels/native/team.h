// A thread's helpers, who share the work of one op after the other.
//
// They wait for the next op with open eyes, but not for long: between the ops of a step they are there at once, and
// after it they sleep. OpenMP's either sleep at once, when a process has more of them than processors, which made a
// step of one token take 8 ms instead of 5; or they spin for milliseconds, which makes it 20 ms on a busy machine.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "futex.h"
#include "vector.h"

// Up to how many tokens our linear layers are faster than oneDNN: on AVX-512 1.5 times at 8 tokens, 1.1 at 64, and
// they meet at 256; on AVX2 1.5 times at 1 token, 1.1 at 2 and slower from 3 on. The ops of such steps share these
// threads; those of larger steps stay with OpenMP, whose threads oneDNN keeps spinning.
constexpr int64_t MAX_TEAM_TOKENS = LANES == 16 ? 256 : LANES == 8 ? 2 : 4;

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;

  // Calls work() here and on those helpers that come while it lasts: one that other processes keep from its processor
  // is not waited for, so the work must be what whoever comes takes a piece of.
  template <typename Work>
  void run(const Work& work) {
    call_ = [](const void* what) { (*static_cast<const Work*>(what))(); };
    what_ = &work;
    open();
    work();
    close();
  }

 private:
  void help();
  void open();
  void close();

  std::vector<std::thread> helpers_;
  void (*call_)(const void*) = nullptr;
  const void* what_ = nullptr;
  std::atomic<bool> ends_{false};
  std::atomic<int> caller_processor_{-1};
  alignas(64) std::atomic<uint32_t> round_{0};  // of work, odd while helpers may come
  std::atomic<int> sleepers_{0};                // helpers who sleep until the next
  alignas(64) std::atomic<uint32_t> busy_{0};   // helpers who have come
  std::atomic<int> waiting_{0};                 // whether the caller sleeps until they are done
};

// The calling thread's team of so many, itself included.
Team& team_of(int size);

// Calls work(next) on each thread, where next() is a task below `count` that no other has got, or none any more.
template <typename Work>
void share_tasks(int64_t count, int64_t num_tokens, int threads, const Work& work) {
  std::atomic<int64_t> num_taken{0};
  auto next = [&] { return num_taken.fetch_add(1, std::memory_order_relaxed); };
  if (threads <= 1 || count <= 1) {
    work(next);
  } else if (num_tokens <= MAX_TEAM_TOKENS) {
    team_of(threads).run([&] { work(next); });
  } else {
#pragma omp parallel num_threads(threads)
    work(next);
  }
}
