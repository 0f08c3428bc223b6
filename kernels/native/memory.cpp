#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#endif

extern "C" {

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
