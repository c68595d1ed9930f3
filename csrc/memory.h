#pragma once
// Raw memory: huge-page backed when large, cache-line aligned when small. Always zeroed.
#include <cstddef>
#include <mutex>

namespace shoal {

class Block {
 public:
  Block() = default;
  explicit Block(std::size_t bytes);
  static Block packed(std::size_t bytes);  // small ones share huge pages
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
  bool packed_ = false;
};

// A fork holds it, so that a child finds packed blocks whole.
std::mutex& packed_blocks_mutex();

}  // namespace shoal
