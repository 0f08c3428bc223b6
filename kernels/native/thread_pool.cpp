#include "thread_pool.h"

#include <system_error>

namespace {

// Longer than the time between two ops of a step.
constexpr auto SPIN_TIME = std::chrono::microseconds(100);
constexpr auto MAX_SLEEP = std::chrono::seconds(10);

// Waits until the word differs from `seen`.
void wait_until_changed(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& num_sleeping) {
  if (spin_until_changed(word, seen, SPIN_TIME)) return;
  num_sleeping.fetch_add(1);
  while (word.load() == seen) sleep_until_changed(word, seen, MAX_SLEEP);
  num_sleeping.fetch_sub(1);
}

// A forked process has the memory of its parent's pools, but not their threads.
std::atomic<int> num_forks{0};

struct LocalPool {
  std::unique_ptr<ThreadPool> pool;
  int size = 0;
  int fork = 0;

  ~LocalPool() { abandon_if_forked(); }

  void abandon_if_forked() {
    if (fork != num_forks.load()) (void)pool.release();
  }
};

}  // namespace

ThreadPool::ThreadPool(int size) {
#if defined(__linux__)
  if (sched_getaffinity(0, sizeof processors_, &processors_)) CPU_ZERO(&processors_);
#endif
  try {
    while (int(workers_.size()) < size - 1) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // The system gives no more threads; the pool works with those it has.
  }
}

ThreadPool::~ThreadPool() {
  is_stopping_ = true;
  epoch_.fetch_add(1);
  wake_all(epoch_);
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::work() {
  for (uint32_t last = 0; !is_stopping_.load();) {
    const uint32_t epoch = epoch_.load();
    if (epoch % 2 == 0 || epoch == last) {
      wait_until_changed(epoch_, epoch, num_sleeping_);
      continue;
    }
    // The caller closes the epoch before it reads num_busy_, so an epoch that is open here lasts until this is done.
    num_busy_.fetch_add(1);
    if (epoch_.load() == epoch && !is_stopping_.load()) call_(argument_);
    num_busy_.fetch_sub(1);
    if (is_caller_waiting_.load()) wake_all(num_busy_);
    last = epoch;
  }
}

void ThreadPool::open() {
  leave_processor_to_caller();
  epoch_.fetch_add(1);
  if (num_sleeping_.load()) wake_all(epoch_);
}

// Linux tends to wake a thread on the processor of the waking thread, where it waits until that thread rests. The caller
// does not rest, and a worker that waits there cannot move itself.
void ThreadPool::leave_processor_to_caller() {
#if defined(__linux__)
  const int processor = sched_getcpu();
  if (processor == caller_processor_) return;
  caller_processor_ = processor;
  cpu_set_t others = processors_;
  CPU_CLR(processor, &others);
  if (!CPU_COUNT(&others)) return;
  for (auto& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
#endif
}

void ThreadPool::close() {
  epoch_.fetch_add(1);
  while (const uint32_t busy = num_busy_.load()) wait_until_changed(num_busy_, busy, is_caller_waiting_);
}

ThreadPool& local_thread_pool(int size) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks++; });
  (void)registered;
  thread_local LocalPool local;
  local.abandon_if_forked();
  if (!local.pool || local.size != size) {
    local.pool = nullptr;
    local.pool = std::make_unique<ThreadPool>(size);
    local.size = size;
    local.fork = num_forks.load();
  }
  return *local.pool;
}
