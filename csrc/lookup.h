#pragma once
// The int64 tables that src/shoal/lookup.py compiles a plan to; it describes every column.
#include <cstdint>

namespace shoal {

// A row of LookupTables.features_F.
struct PlanFeature {
  std::int64_t first, last, pooling, length, low, high;
};

// A row of LookupTables.slices_S.
struct PlanSlice {
  std::int64_t feature, start, width, output, place, step, role, floats_before, stride;

  bool adds() const { return role == 2; }  // to what earlier slices wrote
};

// Poolings of a feature.
constexpr std::int64_t kSum = 0;
constexpr std::int64_t kDivided = 1;  // the sum over the number of ids
constexpr std::int64_t kMean = 2;     // a mean as shards take it: every row times 1 / number, summed
constexpr std::int64_t kFirstN = 3;
constexpr std::int64_t kByRow = 8;    // with 0 or kMean: every row goes to the output by itself

}  // namespace shoal
