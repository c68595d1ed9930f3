#pragma once
// Rows of ids, pooled per example and laid out as model inputs, and the gradient back to the rows.
// lookup.h has the rows of a plan; LayoutIndex in src/shoal/ops/layout_plan.py the rest.
#include <cstdint>
#include <vector>

#include "lookup.h"

namespace shoal {

// A row of LayoutIndex.cells_RF.
struct LayoutCells {
  std::int64_t first, count, shared;
};

struct LayoutPlanView {
  const PlanFeature* features;
  const PlanSlice* slices;
  std::int64_t n_features, n_slices;
  std::int64_t floats;  // of all slices, one after the other
};

struct LayoutIndexView {
  const std::int64_t* rows;     // (n)
  const std::int32_t* buffers;  // (n)
  std::int64_t n;
  const std::int64_t* splits;  // (n_cells + 1)
  std::int64_t n_cells;
  const LayoutCells* cells;  // (requests, n_features)
  std::vector<std::int64_t> batch_sizes;  // (requests)
};

struct LayoutBuffers {
  std::vector<void*> data;
  std::vector<std::int64_t> floats;
};

// False when a value of the index is out of range: outputs are then unfinished, and the caller
// finds the words. outputs: (examples, its stride) each.
template <class T>
bool layout_forward(const LayoutPlanView& plan, const LayoutIndexView& index,
                    const LayoutBuffers& buffers, const std::vector<void*>& outputs, int threads);

// Writes all of every buffer: sums, in order of feature, example and id, of `scale` times the
// gradients of what each row went to. A null gradient counts as zeros. One request only.
template <class T>
bool layout_backward(const LayoutPlanView& plan, const LayoutIndexView& index,
                     const std::vector<void*>& grads, double scale,
                     const LayoutBuffers& buffers, int threads);

// What both check before they start: cells and splits, but not rows.
bool layout_cells_fit(const LayoutPlanView& plan, const LayoutIndexView& index);

}  // namespace shoal
