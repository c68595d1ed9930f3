#include "memory.h"

#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace shoal {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;

void* map(std::size_t bytes) {
  void* const mapping =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  return mapping;
}

// The first address of a mapping that is aligned so; huge pages from there on.
char* aligned(void* mapping, std::size_t to, std::size_t huge_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  char* const start = reinterpret_cast<char*>((address + to - 1) & ~(to - 1));
#ifdef MADV_HUGEPAGE
  ::madvise(start, huge_bytes, MADV_HUGEPAGE);
#endif
  return start;
}

}  // namespace

std::mutex& packed_blocks_mutex() {
  static std::mutex* const mutex = new std::mutex();  // outlives every block
  return *mutex;
}

// Packed blocks lie in huge pages next to each other: a step over a thousand small tables reads few
// page tables (decision 0032). A block that comes back waits for the next of its size; a chunk goes
// back to the system when all its blocks have come back.
class PackedBlocks {
 public:
  static PackedBlocks& of(bool outgrown) {
    static PackedBlocks* const kept = new PackedBlocks(16 * kHuge);
    static PackedBlocks* const moving = new PackedBlocks(2 * kHuge);
    return outgrown ? *moving : *kept;
  }

  char* take(std::size_t bytes) {
    const Size size(bytes);
    const std::lock_guard guard(packed_blocks_mutex());
    char* data = reinterpret_cast<char*>(free_[size.number]);
    if (data != nullptr) {
      free_[size.number] = free_[size.number]->next;
    } else {
      if (left_ < size.bytes) begin_chunk();
      left_ -= size.bytes;
      data = std::exchange(next_, next_ + size.bytes);
    }
    ++chunk_at(data)->taken;
    return data;
  }

  void give_back(char* data, std::size_t bytes) noexcept {
    const Size size(bytes);
    const std::lock_guard guard(packed_blocks_mutex());
    free_[size.number] = new (data) Free{free_[size.number]};
    Chunk* const chunk = chunk_at(data);
    if (--chunk->taken == 0 && chunk != chunk_at(next_ - 1)) drop(chunk);
  }

 private:
  explicit PackedBlocks(std::size_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  struct Free {
    Free* next;
  };
  struct alignas(64) Chunk {  // at its start, which is aligned to its size
    void* mapping;
    std::size_t taken;  // blocks
  };
  // Sizes in steps of an eighth of their power of two, of a line at least.
  struct Size {
    explicit Size(std::size_t wanted) {
      std::size_t step = 64;
      for (; step * 16 <= wanted; step *= 2) number += 16;
      number += (wanted + step - 1) / step;
      bytes = (wanted + step - 1) / step * step;
    }
    std::size_t bytes = 0, number = 0;
  };

  Chunk* chunk_at(const void* data) const {
    return reinterpret_cast<Chunk*>(reinterpret_cast<std::uintptr_t>(data) & ~(chunk_bytes_ - 1));
  }

  void begin_chunk() {
    if (next_ != nullptr && chunk_at(next_ - 1)->taken == 0) drop(chunk_at(next_ - 1));
    void* const mapping = map(2 * chunk_bytes_);
    char* const start = aligned(mapping, chunk_bytes_, chunk_bytes_);
    new (start) Chunk{mapping, 0};
    next_ = start + sizeof(Chunk);
    left_ = chunk_bytes_ - sizeof(Chunk);
  }

  void drop(Chunk* chunk) noexcept {
    for (Free*& first : free_) {
      for (Free** at = &first; *at != nullptr;) {
        if (chunk_at(*at) == chunk) {
          *at = (*at)->next;
        } else {
          at = &(*at)->next;
        }
      }
    }
    ::munmap(chunk->mapping, 2 * chunk_bytes_);
  }

  const std::size_t chunk_bytes_;  // of addresses; pages come when touched
  std::array<Free*, 16 * 13> free_{};
  char* next_ = nullptr;
  std::size_t left_ = 0;
};

Block::Block(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes >= kHuge) {
    mapping_ = map(bytes + kHuge);
    // Only whole huge pages: a table's last partial page must not cost two megabytes.
    data_ = aligned(mapping_, kHuge, bytes & ~(kHuge - 1));
    return;
  }
  const std::size_t rounded = (bytes + 63) & ~std::size_t{63};
  data_ = static_cast<char*>(std::aligned_alloc(64, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, rounded);
}

Block Block::packed(std::size_t bytes, bool outgrown) {
  if (bytes == 0 || bytes >= kHuge) return Block(bytes);
  Block block;
  block.pool_ = &PackedBlocks::of(outgrown);
  block.data_ = block.pool_->take(bytes);
  block.bytes_ = bytes;
  std::memset(block.data_, 0, bytes);
  return block;
}

Block::Block(Block&& other) noexcept { *this = std::move(other); }

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    pool_ = std::exchange(other.pool_, nullptr);
  }
  return *this;
}

Block::~Block() { release(); }

void Block::release() noexcept {
  if (mapping_ != nullptr) {
    ::munmap(mapping_, bytes_ + kHuge);
  } else if (pool_ != nullptr) {
    pool_->give_back(data_, bytes_);
  } else {
    std::free(data_);
  }
}

}  // namespace shoal
