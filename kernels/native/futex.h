// Waiting for a word in memory to change, across threads or processes, without a lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks at a word for so long; whether it has become another than `seen`.
inline bool watch(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds open_eyes) {
  const auto bedtime = std::chrono::steady_clock::now() + open_eyes;
  do {
    for (int i = 0; i < 32; i++) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < bedtime);
  return false;
}

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

inline void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds at_most) {
  timespec time{at_most.count() / 1000000000, at_most.count() % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
#include <thread>

inline void sleep_until_changed(std::atomic<uint32_t>&, uint32_t, std::chrono::nanoseconds) {
  std::this_thread::yield();
}
inline void wake(std::atomic<uint32_t>&) {}
#endif
