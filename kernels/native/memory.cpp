#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#endif

extern "C" {

// Lets the allocator keep up to `num_bytes` of freed memory. Otherwise the largest tensors of a step get new pages in
// every layer, and the first access to a new page takes longer than the computation on it.
void quire_keep_freed_memory(int64_t num_bytes) {
#if defined(__GLIBC__)
  constexpr int MAX_MMAP_THRESHOLD = 32 << 20;  // glibc accepts no larger one
  mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD);
  mallopt(M_TRIM_THRESHOLD, int(num_bytes));
#endif
}

// Requests huge pages for memory that is written already: at once where the system can, otherwise in the background.
// Correctness does not depend on the outcome.
void quire_use_huge_pages(void* address, int64_t num_bytes) {
#if defined(__linux__)
  const uintptr_t page = sysconf(_SC_PAGESIZE), begin = ((uintptr_t)address + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)address + num_bytes) / page * page;
  if (begin >= end) return;
  madvise((void*)begin, end - begin, MADV_HUGEPAGE);
  madvise((void*)begin, end - begin, MADV_COLLAPSE);
#endif
}
}
