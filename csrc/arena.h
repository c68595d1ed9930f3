#pragma once
// Rows of one table: four arrays (weights with state, ids, versions, last-seen) with one geometry.
// Blocks never move; row numbers are reused through a free list.
#include <cstdint>
#include <vector>

#include "layout.h"
#include "memory.h"

namespace shoal {

class Arena {
 public:
  Arena(int dim, int state_width, DType dtype);

  RowView view() const;
  // Makes rows for `count` more ids exist; call before take() in a parallel phase. Strong guarantee.
  void reserve(std::size_t count);
  std::int32_t take();            // a free row; reserve() first
  void give_back(std::int32_t row);
  void clear();

  std::size_t high_water() const { return used_; }
  // Where the memory that a row lies in ends.
  std::size_t block_stop(std::size_t row) const {
    const int block = block_of(geometry_, static_cast<std::uint32_t>(row));
    return block_start(block) + block_rows(block);
  }
  std::size_t weight_bytes() const;
  std::size_t state_bytes() const;
  std::size_t metadata_bytes() const;

  std::uint32_t latest() const;  // of the versions of live rows

  static constexpr std::uint32_t kFree = 0;  // version of a row nobody owns

 private:
  std::size_t block_rows(int block) const;
  std::size_t block_start(int block) const;

  int dim_, state_width_;
  DType dtype_;
  Geometry geometry_;
  // The arrays of a block share its memory, in this order: huge pages cover whole multiples of their
  // size, and what every step touches must not lie in the small pages at the end. A row's state
  // follows its weights: a line next to one that is on its way costs next to nothing.
  enum Array { kVersions, kSeen, kIds, kRows, kArrays };
  std::size_t strides_[kArrays];
  std::size_t weight_bytes_, state_bytes_;  // of a row
  std::vector<BlockView> views_;
  std::vector<std::uint32_t> maxima_;  // of versions, by row >> kMaximumShift
  std::vector<Block> blocks_;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  std::vector<std::int32_t> free_;
};

}  // namespace shoal
