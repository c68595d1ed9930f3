#include "arena.h"

#include <algorithm>
#include <stdexcept>

namespace shoal {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{4} << 20;
constexpr std::size_t kMaxRows = (std::size_t{1} << 31) - 2;

std::size_t align64(std::size_t bytes) { return (bytes + 63) & ~std::size_t{63}; }
std::size_t align16(std::size_t bytes) { return (bytes + 15) & ~std::size_t{15}; }

}  // namespace

Arena::Arena(int dim, int state_width, DType dtype)
    : dim_(dim), state_width_(state_width), dtype_(dtype) {
  const std::size_t real = dtype == DType::f64 ? 8 : 4;
  arrays_[0].stride = align16(dim * element_bytes(dtype));
  arrays_[1].stride = align16(state_width * real);
  arrays_[2].stride = 8;
  arrays_[3].stride = 4;
  arrays_[4].stride = 8;
  const std::size_t widest = std::max(arrays_[0].stride, arrays_[1].stride);
  geometry_.chunk = 12;
  while (geometry_.chunk < 16 && (widest << (geometry_.chunk + 1)) <= kChunkBytes) {
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
  v.weights = arrays_[0].biased.data();
  v.state = arrays_[1].biased.data();
  v.ids = arrays_[2].biased.data();
  v.versions = arrays_[3].biased.data();
  v.seen = arrays_[4].biased.data();
  v.weight_stride = arrays_[0].stride;
  v.state_stride = arrays_[1].stride;
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
    std::size_t offsets[6] = {};
    for (int i = 0; i < 5; ++i) offsets[i + 1] = align64(offsets[i] + rows * arrays_[i].stride);
    Block memory(offsets[5]);
    blocks_.reserve(blocks_.size() + 1);
    for (Array& array : arrays_) array.biased.reserve(array.biased.size() + 1);
    for (int i = 0; i < 5; ++i) {
      const auto base = reinterpret_cast<std::uintptr_t>(memory.data()) + offsets[i];
      arrays_[i].biased.push_back(reinterpret_cast<char*>(base - start * arrays_[i].stride));
    }
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
  used_ = 0;
  free_.clear();
}

std::size_t Arena::bytes_of(const Array& array) const {
  // Rows beyond the high-water mark were never touched, so they are not resident.
  return used_ * array.stride;
}

std::size_t Arena::weight_bytes() const { return bytes_of(arrays_[0]); }
std::size_t Arena::state_bytes() const { return bytes_of(arrays_[1]); }
std::size_t Arena::metadata_bytes() const {
  return bytes_of(arrays_[2]) + bytes_of(arrays_[3]) + bytes_of(arrays_[4]) + free_.capacity() * 4;
}

}  // namespace shoal
