#pragma once
// Memory a step works in, kept for the next step: fresh pages cost more than what is done in them.
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "memory.h"

namespace shoal {

// A growing array whose contents do not survive growth.
class Stretch {
 public:
  char* fit(std::size_t bytes) {
    if (block_.bytes() < bytes) {
      block_ = Block();
      block_ = Block(bytes + bytes / 4);
    }
    return block_.data();
  }

 private:
  Block block_;
};

// Consecutive pieces of one array.
class Pieces {
 public:
  void reserve(std::size_t n) { at_ = reinterpret_cast<std::uint32_t*>(memory_.fit(n * 4)); }
  std::uint32_t* take(std::size_t n) {
    std::uint32_t* piece = at_;
    at_ += n;
    return piece;
  }

 private:
  Stretch memory_;
  std::uint32_t* at_ = nullptr;
};

// Rows, bags, sources and order of the items of all tables of one step.
struct ItemLists {
  Pieces rows, bags, sources, order;

  void reserve(std::size_t n) {
    for (Pieces* pieces : {&rows, &bags, &sources, &order}) pieces->reserve(n);
  }
};

class PartScratch {
 public:
  ApplyScratch fit(std::uint32_t n, const RowView& rows, bool in_place) {
    const std::size_t bytes = static_cast<std::size_t>(rows.dim) * real_bytes(rows.dtype);
    const std::size_t stride = (bytes + 63) & ~std::size_t{63};
    const std::size_t many = (std::size_t{n} + 15) & ~std::size_t{15};
    char* lists = lists_.fit(many * 32);
    const auto list = [&](std::size_t number) {
      return reinterpret_cast<std::uint32_t*>(lists + many * 4 * number);
    };
    char* sums = sums_.fit((in_place ? 0 : n) * stride + stride);
    return ApplyScratch{reinterpret_cast<std::int32_t*>(lists), list(1), list(2), list(3), list(4),
                        list(5), reinterpret_cast<std::int64_t*>(list(6)), sums + stride, stride,
                        sums};
  }

 private:
  Stretch lists_, sums_;
};

}  // namespace shoal
