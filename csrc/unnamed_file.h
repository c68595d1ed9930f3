#pragma once
// A file without a name in $TMPDIR, or /tmp; gone when closed.
#include <cstddef>
#include <cstdint>

#include "descriptor.h"

namespace shoal {

class UnnamedFile {
 public:
  UnnamedFile();  // throws std::runtime_error

  // All of it; throw std::runtime_error.
  void write(const void* from, std::size_t bytes, std::uint64_t offset) const;
  void read(void* to, std::size_t bytes, std::uint64_t offset) const;

 private:
  Descriptor file_;
};

}  // namespace shoal
