// A pool of worker threads per calling thread, for the ops of one step.
//
// Workers spin briefly for the next op and then sleep: between the ops of a step they start at once, and after the
// step they use no processor time. OpenMP's threads either sleep after each op, when a process has more threads than
// processors, which made a step of one token take 8 ms instead of 5; or they spin for milliseconds, which makes the
// step take 20 ms on a busy machine. A forked process gets pools of its own; with GCC's OpenMP it would hang.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "futex.h"

class ThreadPool {
 public:
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  // Calls task() on the calling thread and on each worker that wakes up before the caller's call returns. A worker
  // that other processes keep from its processor is not waited for, so task() must take pieces of shared work.
  template <typename Task>
  void run(const Task& task) {
    call_ = [](const void* argument) { (*static_cast<const Task*>(argument))(); };
    argument_ = &task;
    open();
    task();
    close();
  }

 private:
  void work();
  void open();
  void close();
  void leave_processor_to_caller();

  std::vector<std::thread> workers_;
  void (*call_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  std::atomic<bool> is_stopping_{false};
#if defined(__linux__)
  cpu_set_t processors_;       // that the thread which made the pool may use; none if they are not known
  int caller_processor_ = -1;  // in the last task
#endif
  alignas(64) std::atomic<uint32_t> epoch_{0};     // of tasks; odd while workers may join
  std::atomic<int> num_sleeping_{0};               // workers that sleep until the next epoch
  alignas(64) std::atomic<uint32_t> num_busy_{0};  // workers that have joined the task
  std::atomic<int> is_caller_waiting_{0};          // whether the caller sleeps until they are done
};

// The calling thread's pool of `size` threads, the caller included.
ThreadPool& local_thread_pool(int size);

// The order in which parallel_for gives out indices: ranges of nearly equal length take turns, so that threads of the same
// speed work far from each other. Two threads that write neighboring columns of an output lose cache lines to each other,
// because the hardware prefetches beyond what a thread writes: a linear layer of 3,072 outputs and 1,024 tokens took 17.1
// instead of 15.2 ms.
struct Interleaving {
  int64_t num_ranges, quotient, remainder;

  Interleaving(int64_t count, int64_t ranges)
      : num_ranges(ranges), quotient(count / ranges), remainder(count % ranges) {}

  int64_t at(int64_t i) const {
    const int64_t range = i % num_ranges;
    return range * quotient + std::min(range, remainder) + i / num_ranges;
  }
};

// Calls work(next) on each thread. next() returns each index below `count` once, and then indices from `count` up.
template <typename Work>
void parallel_for(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> num_given_out{0};
  const auto give_out = [&] { return num_given_out.fetch_add(1, std::memory_order_relaxed); };
  if (threads <= 1 || count <= 1) {
    work(give_out);
    return;
  }
  const Interleaving order(count, threads);
  const auto next = [&] {
    const int64_t i = give_out();
    return i < count ? order.at(i) : i;
  };
  local_thread_pool(threads).run([&] { work(next); });
}
