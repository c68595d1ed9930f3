#pragma once
// Memory of large outputs, kept for the next one of its size: fresh pages of a 16 MiB tensor cost
// more than gathering its rows.
#include <cstddef>
#include <map>
#include <mutex>

#include "memory.h"

namespace shoal {

class Buffers {
 public:
  static Buffers& instance();

  Block take(std::size_t bytes);  // at least `bytes`; contents are undefined
  void give_back(Block block);

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_;
  std::size_t cached_bytes_ = 0;
};

}  // namespace shoal
