#pragma once
// The layout's backward pass: gradients of cells as rows, and sums of ids filed by row.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ops_buckets.h"
#include "ops_layout.h"
#include "ops_layout_impl.h"
#include "threads.h"

namespace shoal {
namespace {

// All buffers, one after the other.
struct AddressSpace {
  const std::vector<void*>& data;
  std::vector<std::int64_t> begins;  // of each buffer, and the end

  explicit AddressSpace(const LayoutBuffers& buffers) : data(buffers.data), begins{0} {
    for (const std::int64_t floats : buffers.floats) begins.push_back(begins.back() + floats);
  }

  std::int64_t end() const { return begins.back(); }

  template <class T>
  void zero(std::int64_t start, std::int64_t stop) const {
    const auto above = std::upper_bound(begins.begin(), begins.end(), start);
    for (std::size_t m = static_cast<std::size_t>(above - begins.begin()) - 1; start < stop; ++m) {
      const std::int64_t part = std::min(stop, begins[m + 1]) - start;
      if (part == 0) continue;  // there may be no address
      std::memset(static_cast<T*>(data[m]) + (start - begins[m]), 0,
                  static_cast<std::size_t>(part) * sizeof(T));
      start += part;
    }
  }
};

// What the ids of a cell pass on: the columns [low, high) of a row's gradient, once per firstn step.
template <class T>
struct GradRows {
  const LayoutPlanView& plan;
  const LayoutIndexView& index;
  const std::vector<void*>& grads;
  const T scale;
  std::vector<bool> tiled;  // the slices of a feature fill its columns, each once

  GradRows(const LayoutPlanView& p, const LayoutIndexView& i, const std::vector<void*>& g, T factor)
      : plan(p), index(i), grads(g), scale(factor) {
    for (std::int64_t f = 0; f < plan.n_features; ++f) tiled.push_back(tiles(plan.features[f]));
  }

  // Whether a feature passes a gradient on.
  bool works(std::int64_t f) const {
    return plan.features[f].first != plan.features[f].last && index.cells[f].count != 0;
  }

  std::int64_t cell_floats(std::int64_t f) const {
    const PlanFeature& feature = plan.features[f];
    return (feature.high - feature.low) * std::max<std::int64_t>(feature.length, 1);
  }

  T factor(const PlanFeature& feature, std::int64_t count) const {
    const bool mean = feature.pooling == kDivided || (feature.pooling & ~kByRow) == kMean;
    return mean && count > 1 ? scale / static_cast<T>(count) : scale;
  }

  // Cells [b, b + count) of a feature: [count, L or 1, columns].
  void lay(std::int64_t f, std::int64_t b, std::int64_t count, T* out) const {
    const PlanFeature& feature = plan.features[f];
    const LayoutCells& cells = index.cells[f];
    const std::int64_t floats = cell_floats(f);
    const bool copies = tiled[static_cast<std::size_t>(f)] && cells.shared == 0;
    if (!copies) std::memset(out, 0, static_cast<std::size_t>(count * floats) * sizeof(T));
    for (std::int64_t s = feature.first; s < feature.last; ++s) {
      const PlanSlice& slice = plan.slices[s];
      const T* grad = static_cast<const T*>(grads[static_cast<std::size_t>(slice.output)]);
      if (grad == nullptr) continue;
      const std::int64_t width = slice.width;
      if (cells.shared != 0) {  // one cell, whose gradient is the sum over the batch
        each_step(feature, slice, grad, out, [&](T* to, const T* from) {
          add_strided(to, from, slice.stride, index.batch_sizes[0], width);
        });
        continue;
      }
      for (std::int64_t i = 0; i < count; ++i) {
        each_step(feature, slice, grad + (b + i) * slice.stride, out + i * floats,
                  [&](T* to, const T* from) {
                    copies ? copy_floats(to, from, width) : add_floats(to, from, width);
                  });
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      scale_cell(feature, cells.first + b + i, floats, out + i * floats);
    }
  }

 private:
  bool tiles(const PlanFeature& feature) const {
    std::vector<bool> filled(static_cast<std::size_t>(feature.high - feature.low), false);
    std::int64_t floats = 0;
    for (std::int64_t s = feature.first; s < feature.last; ++s) {
      const PlanSlice& slice = plan.slices[s];
      if (grads[static_cast<std::size_t>(slice.output)] == nullptr) return false;
      for (std::int64_t i = 0; i < slice.width; ++i) {
        filled[static_cast<std::size_t>(slice.start - feature.low + i)] = true;
      }
      floats += slice.width;
    }
    return floats == feature.high - feature.low &&
           std::find(filled.begin(), filled.end(), false) == filled.end();
  }

  // each(out, grad) for the columns of a slice of every step.
  template <class Each>
  static void each_step(const PlanFeature& feature, const PlanSlice& slice, const T* grad, T* out,
                        const Each& each) {
    const std::int64_t steps = std::max<std::int64_t>(feature.length, 1);
    out += slice.start - feature.low;
    grad += slice.place;
    for (std::int64_t j = 0; j < steps; ++j) {
      each(out, grad);
      out += feature.high - feature.low;
      grad += slice.step;
    }
  }

  void scale_cell(const PlanFeature& feature, std::int64_t cell, std::int64_t floats,
                  T* out) const {
    const T by = factor(feature, index.splits[cell + 1] - index.splits[cell]);
    if (by == T(1)) return;
    for (std::int64_t i = 0; i < floats; ++i) out[i] *= by;
  }
};

// Gradients of ids filed under the stretches of addresses that their rows lie in, in order of
// feature, example and id; then each stretch is zeroed and summed by one thread.
template <class T>
class FiledSum {
 public:
  FiledSum(const GradRows<T>& grads, const AddressSpace& space, const RowFinder<T>& finder,
           int threads)
      : grads_(grads),
        plan_(grads.plan),
        index_(grads.index),
        space_(space),
        finder_(finder),
        threads_(threads) {}

  void run() {
    cut();
    Pool& pool = Pool::instance();
    laid_.reset(new T[static_cast<std::size_t>(begins_.back())]);
    pool.run(plan_.n_features, threads_, [&](std::int64_t f, int) {
      if (grads_.works(f)) grads_.lay(f, 0, index_.cells[f].count, laid_.get() + begin(f));
    });
    const auto route = [&](std::int64_t first, std::int64_t last, auto put) -> std::int64_t {
      each_id(first, last, [&](std::int64_t address, Piece piece) {
        for (std::int64_t left = piece.width; left > 0; left -= piece.width) {
          const std::int64_t stretch = address >> shift_;
          piece.width = std::min(left, ((stretch + 1) << shift_) - address);
          put(stretch, piece);
          address += piece.width;
          piece.from += piece.width;
          piece.to += piece.width;
        }
      });
      return -1;
    };
    const std::int64_t cells = plan_.n_features * index_.batch_sizes[0];
    const auto parts = in_buckets<Piece>(cells, stretches_, threads_, route);
    pool.run(stretches_, threads_, [&](std::int64_t s, int) {
      space_.zero<T>(s << shift_, std::min((s + 1) << shift_, space_.end()));
      for (const Piece* one = parts.begin(s); one < parts.begin(s + 1); ++one) {
        add_floats(one->to, one->from, one->width);
      }
    });
  }

 private:
  static constexpr std::int64_t kStretchBytes = 128 << 10;
  static constexpr std::int64_t kMostStretches = 4096;

  // What one id passes on to a stretch.
  struct Piece {
    const T* from;
    T* to;
    std::int64_t width;
  };

  const GradRows<T>& grads_;
  const LayoutPlanView& plan_;
  const LayoutIndexView& index_;
  const AddressSpace& space_;
  const RowFinder<T>& finder_;
  const int threads_;
  int shift_ = 0;
  std::int64_t stretches_ = 0;
  std::vector<std::int64_t> begins_;  // of each feature's cells' gradients in laid_, and the end
  std::unique_ptr<T[]> laid_;

  std::int64_t begin(std::int64_t f) const { return begins_[static_cast<std::size_t>(f)]; }

  void cut() {
    const std::int64_t least = kStretchBytes / static_cast<std::int64_t>(sizeof(T));
    while ((std::int64_t{1} << shift_) < least) ++shift_;
    while (((space_.end() - 1) >> shift_) >= kMostStretches) ++shift_;
    stretches_ = space_.end() == 0 ? 0 : ((space_.end() - 1) >> shift_) + 1;
    begins_.assign(1, 0);
    for (std::int64_t f = 0; f < plan_.n_features; ++f) {
      const std::int64_t own = grads_.works(f) ? index_.cells[f].count * grads_.cell_floats(f) : 0;
      begins_.push_back(begins_.back() + own);
    }
  }

  // Calls visit(address, piece) for the ids of cells [at, stop) that pass a gradient on.
  template <class Visit>
  void each_id(std::int64_t at, std::int64_t stop, const Visit& visit) const {
    const std::int64_t size = index_.batch_sizes[0];
    while (at < stop) {
      const std::int64_t f = at / size;
      const std::int64_t from = at - f * size;
      const std::int64_t to = std::min(size, stop - f * size);
      at = f * size + to;
      if (!grads_.works(f)) continue;
      const PlanFeature& feature = plan_.features[f];
      const LayoutCells& own = index_.cells[f];
      const std::int64_t last = std::min(to, own.count);  // a shared cell is example 0's
      const std::int64_t width = feature.high - feature.low;
      for (std::int64_t b = from; b < last; ++b) {
        const std::int64_t start = index_.splits[own.first + b];
        std::int64_t end = index_.splits[own.first + b + 1];
        const bool first_n = feature.pooling == kFirstN;
        if (first_n) end = std::min(end, start + feature.length);
        const T* grad = laid_.get() + begin(f) + b * grads_.cell_floats(f);
        for (std::int64_t id = start; id < end; ++id, grad += first_n ? width : 0) {
          const auto m = static_cast<std::size_t>(index_.buffers[id]);
          visit(space_.begins[m] + index_.rows[id] + feature.low,
                Piece{grad, finder_.find(id, feature.high) + feature.low, width});
        }
      }
    }
  }
};

}  // namespace
}  // namespace shoal
