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

// What shoal.lookup.LayoutCall has, by address: rows, buffers, splits, cells, features, slices; and
// the numbers of ids, cells, features, slices and floats of slices.
struct LayoutCall {
  LayoutPlanView plan;
  LayoutIndexView index;

  LayoutCall(const Addresses& at, const Sizes& n, const Sizes& batch_sizes)
      : plan{at_address<const PlanFeature>(at[4]), at_address<const PlanSlice>(at[5]), n[2], n[3],
             n[4]},
        index{at_address<const std::int64_t>(at[0]), at_address<const std::int32_t>(at[1]), n[0],
              at_address<const std::int64_t>(at[2]), n[1], at_address<const LayoutCells>(at[3]),
              batch_sizes} {}
};

void bind_layout(nb::module_& m) {
  m.def(
      "layout_forward",
      [](const Addresses& buffers, const Sizes& floats, const Addresses& at, const Sizes& sizes,
         const Sizes& batch_sizes, const Addresses& outputs, bool wide, int threads) {
        const LayoutCall call(at, sizes, batch_sizes);
        const LayoutBuffers all{pointers_at(buffers), floats};
        const auto targets = pointers_at(outputs);
        return wide ? layout_forward<double>(call.plan, call.index, all, targets, threads)
                    : layout_forward<float>(call.plan, call.index, all, targets, threads);
      },
      "buffers"_a, "floats"_a, "call"_a, "sizes"_a, "batch_sizes"_a, "outputs"_a, "wide"_a,
      "threads"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "layout_backward",
      [](const Addresses& grads, double scale, const Addresses& buffers, const Sizes& floats,
         const Addresses& at, const Sizes& sizes, const Sizes& batch_sizes, bool wide,
         int threads) {
        const LayoutCall call(at, sizes, batch_sizes);
        const LayoutBuffers all{pointers_at(buffers), floats};
        const auto sources = pointers_at(grads);
        return wide ? layout_backward<double>(call.plan, call.index, sources, scale, all, threads)
                    : layout_backward<float>(call.plan, call.index, sources,
                                             static_cast<float>(scale), all, threads);
      },
      "grads"_a, "scale"_a, "buffers"_a, "floats"_a, "call"_a, "sizes"_a, "batch_sizes"_a, "wide"_a,
      "threads"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_layout_ops(nb::module_& m) {
  bind_layout(m);
}

}  // namespace shoal
