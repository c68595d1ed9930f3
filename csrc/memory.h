#pragma once
// Raw memory: huge-page backed when large, cache-line aligned when small. Always zeroed.
#include <cstddef>
#include <vector>

namespace shoal {

class Block {
 public:
  Block() = default;
  explicit Block(std::size_t bytes);
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
  std::size_t mapping_bytes_ = 0;
};

}  // namespace shoal
