#pragma once
// A file without a name in $TMPDIR, or /tmp; gone when closed.
#include <cstddef>
#include <cstdint>
#include <utility>

namespace shoal {

class UnnamedFile {
 public:
  UnnamedFile();  // throws std::runtime_error
  UnnamedFile(UnnamedFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UnnamedFile& operator=(UnnamedFile&&) = delete;
  ~UnnamedFile();

  // All of it; throw std::runtime_error.
  void write(const void* from, std::size_t bytes, std::uint64_t offset) const;
  void read(void* to, std::size_t bytes, std::uint64_t offset) const;

 private:
  int fd_;
};

}  // namespace shoal
