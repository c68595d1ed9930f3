#include <nanobind/stl/vector.h>

#include "bind_ops.h"
#include "ops_layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Sizes = std::vector<std::int64_t>;

std::vector<void*> pointers_at(const Addresses& addresses) {
  std::vector<void*> result(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) result[i] = at_address<void>(addresses[i]);
  return result;
}

LayoutPlanView plan_at(Address features, std::int64_t n_features, Address slices,
                       std::int64_t n_slices, std::int64_t floats) {
  return {at_address<const PlanFeature>(features), at_address<const PlanSlice>(slices),
          n_features, n_slices, floats};
}

LayoutIndexView index_at(Address rows, Address buffers, std::int64_t n, Address splits,
                         std::int64_t n_cells, Address cells, Sizes batch_sizes) {
  return {at_address<const std::int64_t>(rows), at_address<const std::int32_t>(buffers), n,
          at_address<const std::int64_t>(splits), n_cells, at_address<const LayoutCells>(cells),
          std::move(batch_sizes)};
}

void bind_layout(nb::module_& m) {
  m.def(
      "layout_forward",
      [](const Addresses& buffers, const Sizes& floats, Address rows, Address numbers,
         std::int64_t n, Address splits, std::int64_t n_cells, Address cells,
         const Sizes& batch_sizes, Address features, std::int64_t n_features, Address slices,
         std::int64_t n_slices, const Addresses& outputs, bool wide, int threads) {
        const auto plan = plan_at(features, n_features, slices, n_slices, 0);
        const auto index = index_at(rows, numbers, n, splits, n_cells, cells, batch_sizes);
        const LayoutBuffers all{pointers_at(buffers), floats};
        const auto targets = pointers_at(outputs);
        return wide ? layout_forward<double>(plan, index, all, targets, threads)
                    : layout_forward<float>(plan, index, all, targets, threads);
      },
      "buffers"_a, "floats"_a, "rows"_a, "numbers"_a, "n"_a, "splits"_a, "n_cells"_a, "cells"_a,
      "batch_sizes"_a, "features"_a, "n_features"_a, "slices"_a, "n_slices"_a, "outputs"_a,
      "wide"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "layout_backward",
      [](const Addresses& grads, double scale, const Addresses& buffers, const Sizes& floats,
         Address rows, Address numbers, std::int64_t n, Address splits, std::int64_t n_cells,
         Address cells, const Sizes& batch_sizes, Address features, std::int64_t n_features,
         Address slices, std::int64_t n_slices, std::int64_t slice_floats, bool wide,
         int threads) {
        const auto plan = plan_at(features, n_features, slices, n_slices, slice_floats);
        const auto index = index_at(rows, numbers, n, splits, n_cells, cells, batch_sizes);
        const LayoutBuffers all{pointers_at(buffers), floats};
        const auto sources = pointers_at(grads);
        return wide ? layout_backward<double>(plan, index, sources, scale, all, threads)
                    : layout_backward<float>(plan, index, sources, static_cast<float>(scale), all,
                                             threads);
      },
      "grads"_a, "scale"_a, "buffers"_a, "floats"_a, "rows"_a, "numbers"_a, "n"_a, "splits"_a,
      "n_cells"_a, "cells"_a, "batch_sizes"_a, "features"_a, "n_features"_a, "slices"_a,
      "n_slices"_a, "slice_floats"_a, "wide"_a, "threads"_a,
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_layout_ops(nb::module_& m) {
  bind_layout(m);
}

}  // namespace shoal
