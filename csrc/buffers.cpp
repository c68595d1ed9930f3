#include "buffers.h"

#include <iterator>
#include <utility>

namespace shoal {
namespace {

constexpr std::size_t kMostCached = std::size_t{256} << 20;

// Sizes in steps of an eighth of their power of two, so that uneven batches share buffers.
std::size_t rounded(std::size_t bytes) {
  std::size_t step = 4096;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

Buffers& Buffers::instance() {
  static Buffers* const buffers = new Buffers();  // outlives every tensor that returns memory
  return *buffers;
}

Block Buffers::take(std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  {
    const std::lock_guard guard(mutex_);
    const auto found = free_.find(size);
    if (found != free_.end()) {
      Block block = std::move(found->second);
      free_.erase(found);
      cached_bytes_ -= size;
      return block;
    }
  }
  return Block(size);
}

void Buffers::give_back(Block block) {
  const std::size_t size = block.bytes();
  const std::lock_guard guard(mutex_);
  if (size > kMostCached) return;
  // Sizes of the past make way for those of the present.
  while (cached_bytes_ + size > kMostCached && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    cached_bytes_ -= largest->first;
    free_.erase(largest);
  }
  cached_bytes_ += size;
  free_.emplace(size, std::move(block));
}

}  // namespace shoal
