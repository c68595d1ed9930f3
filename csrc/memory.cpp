#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define SHOAL_MMAP 1
#endif

namespace shoal {
namespace {
constexpr std::size_t kHuge = std::size_t{2} << 20;
}

Block::Block(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
#ifdef SHOAL_MMAP
  if (bytes >= kHuge) {
    // A mapping aligned to a huge page; what lies before the aligned start is never touched.
    const std::size_t whole = bytes + kHuge;
    void* mapping =
        ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapping);
    data_ = reinterpret_cast<char*>((address + kHuge - 1) & ~(kHuge - 1));
    mapping_ = mapping;
    mapping_bytes_ = whole;
#ifdef MADV_HUGEPAGE
    // Only whole huge pages: a table's last partial page must not cost two megabytes.
    ::madvise(data_, bytes & ~(kHuge - 1), MADV_HUGEPAGE);
#endif
    return;
  }
#endif
  const std::size_t rounded = (bytes + 63) & ~std::size_t{63};
  data_ = static_cast<char*>(std::aligned_alloc(64, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, rounded);
}

Block::Block(Block&& other) noexcept { *this = std::move(other); }

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapping_bytes_ = std::exchange(other.mapping_bytes_, 0);
  }
  return *this;
}

Block::~Block() { release(); }

void Block::release() noexcept {
#ifdef SHOAL_MMAP
  if (mapping_ != nullptr) {
    ::munmap(mapping_, mapping_bytes_);
    mapping_ = nullptr;
    data_ = nullptr;
    return;
  }
#endif
  std::free(data_);
  data_ = nullptr;
}

}  // namespace shoal
