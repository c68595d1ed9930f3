#include "arena.h"

#include <algorithm>
#include <stdexcept>

#include "kernels.h"

namespace shoal {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
constexpr std::size_t kMaxRows = (std::size_t{1} << 31) - 2;

std::size_t align64(std::size_t bytes) { return (bytes + 63) & ~std::size_t{63}; }
std::size_t align16(std::size_t bytes) { return (bytes + 15) & ~std::size_t{15}; }

}  // namespace

Arena::Arena(int dim, int state_width, DType dtype)
    : dim_(dim), state_width_(state_width), dtype_(dtype) {
  strides_[kVersions] = 4;
  strides_[kSeen] = 8;
  strides_[kIds] = 8;
  weight_bytes_ = shoal::weight_bytes(view());
  state_bytes_ = align16(shoal::state_bytes(view()));
  if (dtype != DType::i8 || state_width > 0) weight_bytes_ = align16(weight_bytes_);
  strides_[kRows] = weight_bytes_ + state_bytes_;
  // Whole lines where that costs an eighth at most.
  const std::size_t whole = align64(strides_[kRows]);
  if (whole - strides_[kRows] <= whole / 8) strides_[kRows] = whole;
  const std::size_t widest = std::max(weight_bytes_, state_bytes_);
  geometry_.chunk = 12;
  while (geometry_.chunk < 18 && (widest << (geometry_.chunk + 1)) <= kChunkBytes) {
    ++geometry_.chunk;
  }
  geometry_.first = 8;
}

std::size_t Arena::block_rows(int block) const {
  if (block == 0) return std::size_t{1} << geometry_.first;
  const int shift = geometry_.first + block - 1;
  return std::size_t{1} << std::min(shift, geometry_.chunk);
}

std::size_t Arena::block_start(int block) const {
  if (block == 0) return 0;
  const int doubling = geometry_.chunk - geometry_.first;
  if (block <= doubling) return std::size_t{1} << (geometry_.first + block - 1);
  return static_cast<std::size_t>(block - doubling) << geometry_.chunk;
}

RowView Arena::view() const {
  RowView v;
  v.blocks = views_.data();
  v.maxima = const_cast<std::uint32_t*>(maxima_.data());  // as the blocks: the view writes rows
  v.weight_stride = v.state_stride = strides_[kRows];
  v.geometry = geometry_;
  v.dim = dim_;
  v.state_width = state_width_;
  v.dtype = dtype_;
  return v;
}

void Arena::reserve(std::size_t count) {
  const std::size_t fresh = count > free_.size() ? count - free_.size() : 0;
  const std::size_t wanted = used_ + fresh;
  if (wanted > kMaxRows) throw std::length_error("a table holds at most 2^31 - 2 rows");
  while (capacity_ < wanted) {
    const int block = static_cast<int>(blocks_.size());
    const std::size_t rows = block_rows(block), start = block_start(block);
    std::size_t offsets[kArrays + 1] = {};
    for (int i = 0; i < kArrays; ++i) offsets[i + 1] = align64(offsets[i] + rows * strides_[i]);
    Block memory = Block::packed(offsets[kArrays]);
    blocks_.reserve(blocks_.size() + 1);
    maxima_.resize(std::max(maxima_.size(), ((start + rows - 1) >> kMaximumShift) + 1), kFree);
    const auto biased = [&](int i) {
      const auto base = reinterpret_cast<std::uintptr_t>(memory.data()) + offsets[i];
      return reinterpret_cast<char*>(base - start * strides_[i]);
    };
    char* const weights = biased(kRows);
    views_.push_back(BlockView{weights, weights + weight_bytes_, biased(kIds), biased(kVersions),
                               biased(kSeen)});
    blocks_.push_back(std::move(memory));
    capacity_ += rows;
  }
}

std::int32_t Arena::take() {
  if (!free_.empty()) {
    const std::int32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  return static_cast<std::int32_t>(used_++);
}

void Arena::give_back(std::int32_t row) {
  row_version(view(), static_cast<std::uint32_t>(row)) = kFree;
  free_.push_back(row);
}

void Arena::clear() {
  // Blocks stay: a cleared table is about to be filled again, and touching memory is what costs.
  const RowView v = view();
  for (std::size_t row = 0; row < used_; ++row) row_version(v, static_cast<std::uint32_t>(row)) = kFree;
  std::fill(maxima_.begin(), maxima_.end(), kFree);
  used_ = 0;
  free_.clear();
}

std::uint32_t Arena::latest() const {
  constexpr std::size_t kGroup = std::size_t{1} << kMaximumShift;
  const RowView v = view();
  std::uint32_t latest = kFree;
  for (std::size_t row = 0; row < used_; row = (row | (kGroup - 1)) + 1) {
    // A maximum may be that of a row that is gone.
    if (maxima_[row >> kMaximumShift] <= latest) continue;
    for (std::size_t r = row; r < std::min(used_, row + kGroup); ++r) {
      latest = std::max(latest, row_version(v, static_cast<std::uint32_t>(r)));
    }
  }
  return latest;
}

// Rows beyond the high-water mark were never touched, so they are not resident.
// What fills lines up counts with the weights.
std::size_t Arena::weight_bytes() const { return used_ * strides_[kRows] - state_bytes(); }
std::size_t Arena::state_bytes() const { return used_ * shoal::state_bytes(view()); }
std::size_t Arena::metadata_bytes() const {
  return used_ * (strides_[kIds] + strides_[kVersions] + strides_[kSeen]) +
         (free_.capacity() + maxima_.capacity()) * 4;
}

}  // namespace shoal
