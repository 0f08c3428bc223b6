#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

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

namespace {

// memcpy copies pieces of 4 KiB to some MiB by instructions for strings, which on Zen 3 take 3 GB/s into memory that
// begins within a cache line, and read each line of the target first. Stores that bypass the cache write 17 GB/s, twice
// as much as memcpy, but whoever reads the target next reads it from memory.
template <bool BYPASSES_CACHE>
void copy_piece(char* target, const char* source, uint64_t num_bytes) {
  uint64_t i = 0;
#if defined(__AVX__)
  constexpr uint64_t VECTOR_BYTES = sizeof(__m256i), STEP = 4 * VECTOR_BYTES;
  i = -(uintptr_t)target % VECTOR_BYTES;
  if (i + STEP > num_bytes) i = 0;
  memcpy(target, source, i);
  for (; i + STEP <= num_bytes && (uintptr_t)(target + i) % VECTOR_BYTES == 0; i += STEP) {
    __m256i vectors[4];
    for (int j = 0; j < 4; ++j) vectors[j] = _mm256_loadu_si256((const __m256i*)(source + i) + j);
    for (int j = 0; j < 4; ++j) {
      __m256i* place = (__m256i*)(target + i) + j;
      BYPASSES_CACHE ? _mm256_stream_si256(place, vectors[j]) : _mm256_store_si256(place, vectors[j]);
    }
  }
#endif
  memcpy(target + i, source + i, num_bytes - i);
}

}  // namespace

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

// Maps a file over address space that is reserved already. Returns whether the system did.
int quire_map_file(int descriptor, void* address, int64_t num_bytes, int is_read_only) {
#if defined(__linux__)
  const int protection = is_read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  return mmap(address, num_bytes, protection, MAP_SHARED | MAP_FIXED, descriptor, 0) == address;
#else
  return 0;
#endif
}

// Allocates huge pages for a file in memory that consists of zeros. A collapse needs a page that is written; the zeros
// of the others it writes at 10 GB/s, where the first access to each small page would write 1.
void quire_allocate_huge_pages(void* address, int64_t num_bytes, int64_t huge_page_bytes) {
  for (int64_t start = 0; start < num_bytes; start += huge_page_bytes) ((volatile char*)address)[start] = 0;
  quire_use_huge_pages(address, num_bytes);
}

// Copies pieces of memory, one after the other. Stores bypass the cache for targets that are not read soon.
void quire_copy_pieces(const uint64_t* targets, const uint64_t* sources, const uint64_t* lengths, int64_t num_pieces,
                       int bypasses_cache) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    char* target = (char*)targets[i];
    const char* source = (const char*)sources[i];
    bypasses_cache ? copy_piece<true>(target, source, lengths[i]) : copy_piece<false>(target, source, lengths[i]);
  }
#if defined(__AVX__)
  if (bypasses_cache) _mm_sfence();
#endif
}
}
