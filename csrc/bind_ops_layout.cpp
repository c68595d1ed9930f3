#include <nanobind/stl/vector.h>

#include "bind.h"
#include "ops_layout.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// What shoal.lookup.LayoutCall has, by address: rows, buffers, splits, cells, features, slices; and
// the numbers of ids, cells, features, slices and floats of slices.
struct LayoutCall {
  LayoutPlanView plan;
  LayoutIndexView index;

  LayoutCall(const Addresses& from, const Sizes& n, const Sizes& batch_sizes)
      : plan{at<const PlanFeature>(from[4]), at<const PlanSlice>(from[5]), n[2], n[3], n[4]},
        index{at<const std::int64_t>(from[0]), at<const std::int32_t>(from[1]), n[0],
              at<const std::int64_t>(from[2]), n[1], at<const LayoutCells>(from[3]),
              batch_sizes} {}
};

}  // namespace

void bind_layout_ops(nb::module_& m) {
  m.def("layout_forward",
        [](const Addresses& buffers, const Sizes& floats, const Addresses& outputs,
           const Addresses& from, const Sizes& sizes, const Sizes& batch_sizes, bool wide,
           int threads) {
          const LayoutCall call(from, sizes, batch_sizes);
          const LayoutBuffers all{all_at<void>(buffers), floats};
          const auto run = wide ? layout_forward<double> : layout_forward<float>;
          return run(call.plan, call.index, all, all_at<void>(outputs), threads);
        },
        Release());
  m.def("layout_backward",
        [](const Addresses& grads, double scale, const Addresses& buffers, const Sizes& floats,
           const Addresses& from, const Sizes& sizes, const Sizes& batch_sizes, bool wide,
           int threads) {
          const LayoutCall call(from, sizes, batch_sizes);
          const LayoutBuffers all{all_at<void>(buffers), floats};
          const auto run = wide ? layout_backward<double> : layout_backward<float>;
          return run(call.plan, call.index, all_at<void>(grads), scale, all, threads);
        },
        Release());
}

}  // namespace shoal
