#pragma once
// Memory of large outputs, kept for the next one of its size: fresh pages of a 16 MiB tensor cost
// more than gathering its rows.
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "memory.h"

namespace shoal {

class Buffers {
 public:
  static Buffers& instance();
  std::mutex& mutex() { return mutex_; }

  Block take(std::size_t bytes);  // at least `bytes`; contents are undefined
  void give_back(Block block);

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_;
  std::size_t cached_bytes_ = 0;
};

// Memory for n entries for the length of one call; its pages stay warm for the next. Contents are
// undefined.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::integral auto n)
      : size_(static_cast<std::size_t>(n)),
        block_(Buffers::instance().take(std::max<std::size_t>(size_, 1) * sizeof(T))) {}
  ~Scratch() { Buffers::instance().give_back(std::move(block_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return reinterpret_cast<T*>(block_.data()); }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  Block block_;
};

}  // namespace shoal
