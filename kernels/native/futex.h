// Waits until a word in memory changes, across threads or processes, without a lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for at most `spin_time`; returns whether the word differs from `seen`.
inline bool spin_until_changed(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds spin_time) {
  const auto deadline = std::chrono::steady_clock::now() + spin_time;
  do {
    for (int i = 0; i < 32; i++) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      pause_processor();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

inline void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout) {
  timespec time{timeout.count() / 1000000000, timeout.count() % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
#include <thread>

inline void sleep_until_changed(std::atomic<uint32_t>&, uint32_t, std::chrono::nanoseconds) {
  std::this_thread::yield();
}
inline void wake_all(std::atomic<uint32_t>&) {}
#endif
