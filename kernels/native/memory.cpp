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

// Lets the allocator keep up to so much of what is freed. The largest tensors of a step would otherwise be new pages in
// every layer, whose first touch takes longer than what is computed on them.
void quire_keep_freed_memory(int64_t num_bytes) {
#if defined(__GLIBC__)
  constexpr int LARGEST_THAT_CAN_BE_KEPT = 32 << 20;
  mallopt(M_MMAP_THRESHOLD, LARGEST_THAT_CAN_BE_KEPT);
  mallopt(M_TRIM_THRESHOLD, int(num_bytes));
#endif
}

// Asks the system to put this memory, which is written already, on huge pages: now where it can, in its own time
// otherwise. Nothing depends on whether it does.
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
