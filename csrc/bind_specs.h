#pragma once
// Specs from Python dictionaries. cpu.py builds them from validated dataclasses, so a missing key
// is our own mistake and surfaces as KeyError.
#include <nanobind/nanobind.h>

#include <vector>

#include "shard.h"

namespace shoal {
TableSpec table_from(const nanobind::dict& spec);
Plan plan_from(const PlanFeature* features, std::int64_t n_features, const PlanSlice* slices,
               std::int64_t n_slices, const std::vector<std::int64_t>& widths);
}  // namespace shoal
