#pragma once
// Raw memory: huge-page backed when large, cache-line aligned when small. Always zeroed.
#include <cstddef>
#include <mutex>

namespace shoal {

class PackedBlocks;

class Block {
 public:
  Block() = default;
  explicit Block(std::size_t bytes);
  // Small ones share huge pages, `outgrown` ones apart: most come back soon, and their chunks do.
  static Block packed(std::size_t bytes, bool outgrown = false);
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void release() noexcept;

  char* data_ = nullptr;
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  PackedBlocks* pool_ = nullptr;
};

// A fork holds it, so that a child finds packed blocks whole.
std::mutex& packed_blocks_mutex();

}  // namespace shoal
