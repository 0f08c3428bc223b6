#include "thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

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

// The processors of a worker thread. Linux tends to wake a thread on the processor of the waking thread, where it
// waits until that thread rests. The pool's caller does not rest, so a worker on the caller's processor moves.
class Affinity {
#if defined(__linux__)
 public:
  Affinity() { is_known_ = sched_getaffinity(0, sizeof all_, &all_) == 0; }

  static int processor() { return sched_getcpu(); }

  void avoid(int processor) {
    if (!is_known_ || processor != Affinity::processor()) return;
    cpu_set_t others = all_;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
  }

 private:
  cpu_set_t all_;
  bool is_known_;
#else
 public:
  static int processor() { return -1; }
  void avoid(int) {}
#endif
};

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
  Affinity affinity;
  for (uint32_t last = 0; !is_stopping_.load();) {
    const uint32_t epoch = epoch_.load();
    if (epoch % 2 == 0 || epoch == last) {
      wait_until_changed(epoch_, epoch, num_sleeping_);
      continue;
    }
    affinity.avoid(caller_processor_.load());
    // The caller closes the epoch before it reads num_busy_, so an epoch that is open here lasts until this is done.
    num_busy_.fetch_add(1);
    if (epoch_.load() == epoch && !is_stopping_.load()) call_(argument_);
    num_busy_.fetch_sub(1);
    if (is_caller_waiting_.load()) wake_all(num_busy_);
    last = epoch;
  }
}

void ThreadPool::open() {
  caller_processor_.store(Affinity::processor());
  epoch_.fetch_add(1);
  if (num_sleeping_.load()) wake_all(epoch_);
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
