#pragma once
// Rows of ids, pooled per example and laid out as model inputs, and the gradient back to the rows.
// src/shoal/ops/layout_index.py and layout_specs.py describe the int64 tables read here.
#include <cstdint>
#include <vector>

namespace shoal {

// Columns of LayoutPlan.features_F and slices_S.
struct LayoutFeature {
  std::int64_t first, last, pooling, length, low, high;
};
struct LayoutSlice {
  std::int64_t feature, start, width, output, place, step, role, floats_before, stride;
};
// A row of LayoutIndex.cells_RF.
struct LayoutCells {
  std::int64_t first, count, shared;
};

struct LayoutPlanView {
  const LayoutFeature* features;
  const LayoutSlice* slices;
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
                     const std::vector<void*>& grads, T scale, const LayoutBuffers& buffers,
                     int threads);

// What both check before they start: cells and splits, but not rows.
bool layout_cells_fit(const LayoutPlanView& plan, const LayoutIndexView& index);

}  // namespace shoal
