#include "admission.h"

#include <algorithm>
#include <stdexcept>

namespace shoal {
namespace {
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
constexpr std::uint64_t kLeastBlock = 16;
constexpr std::int64_t kMostCells = 0xffffffffLL;
constexpr std::int64_t kMostOccurrences = 0x7fffffffLL;
}  // namespace

Admission::Admission(AdmissionSpec spec, std::uint64_t salt)
    : spec_(std::move(spec)), salt_(salt), counts_(salt) {
  if (spec_.enabled && spec_.sketch) cells_.assign(spec_.width * spec_.depth, 0);
}

std::size_t Admission::cell_of(std::int64_t id, int row) const {
  const std::uint64_t h = hash_of(id, salt_);
  const std::uint64_t at = mix64(h ^ static_cast<std::uint64_t>(row + 1) * kGolden);
  const std::uint64_t block = std::min(spec_.width, std::max(spec_.width >> 16, kLeastBlock));
  const std::uint64_t first = ((h >> 48) * spec_.width >> 16) & ~(block - 1);
  return static_cast<std::uint64_t>(row) * spec_.width + first + (at & (block - 1));
}

void Admission::change(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n,
                       int sign) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (spec_.required.of(ids[i]) <= 1) continue;
    for (int row = 0; spec_.sketch && row < spec_.depth; ++row) {
      std::uint32_t& c = cells_[cell_of(ids[i], row)];
      c = static_cast<std::uint32_t>(
          std::clamp<std::int64_t>(c + sign * counts[i], 0, kMostCells));
    }
    if (spec_.sketch) continue;
    std::int32_t* const seen = counts_.at(ids[i]);
    const std::int64_t total = (seen == nullptr ? 0 : *seen) + sign * counts[i];
    const auto kept =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(total, 0, kMostOccurrences));
    if (seen != nullptr && kept > 0) {
      *seen = kept;
    } else if (seen != nullptr) {
      counts_.erase(ids[i]);
    } else if (kept > 0) {
      counts_.insert(ids[i], kept);
    }
  }
}

bool Admission::admitted(std::int64_t id) const {
  const std::int64_t required = spec_.required.of(id);
  if (required <= 1) return true;
  if (!spec_.sketch) return counts_.find(id) >= std::min(required, kMostOccurrences);
  std::int64_t total = kMostCells;
  for (int row = 0; row < spec_.depth; ++row) {
    total = std::min<std::int64_t>(total, cells_[cell_of(id, row)]);
  }
  return total >= required;
}

void Admission::forget(std::int64_t id) {
  if (!spec_.sketch) counts_.erase(id);
}

void Admission::clear() {
  counts_.clear();
  std::fill(cells_.begin(), cells_.end(), 0U);
}

void Admission::export_exact(std::vector<std::int64_t>& ids,
                             std::vector<std::int64_t>& counts) const {
  counts_.each([&](std::int64_t id, std::int32_t count) {
    ids.push_back(id);
    counts.push_back(count);
  });
}

void Admission::load_exact(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n) {
  counts_.clear();
  for (std::int64_t i = 0; i < n; ++i) {
    if (counts_.find(ids[i]) == kNoRow) {
      counts_.insert(ids[i], static_cast<std::int32_t>(std::min(counts[i], kMostOccurrences)));
    }
  }
  counts_.rebalance();
}

void Admission::load_cells(const std::uint32_t* cells, std::size_t n) {
  if (n != cells_.size()) throw std::length_error("the sketch has another size");
  cells_.assign(cells, cells + n);
}

}  // namespace shoal
