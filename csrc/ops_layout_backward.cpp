#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>

#include "ops_layout.h"
#include "ops_layout_grad_impl.h"
#include "ops_layout_impl.h"
#include "threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kLaidBytes = 16384;  // gradients of cells that stay in the first-level cache
constexpr std::int64_t kAhead = 16;         // rows touched before they are added to

// Addresses [start, stop) that the rows of one feature span in one buffer.
struct Extent {
  std::int64_t start, stop, feature;
};

// A row's sum is in order of feature, example and id. Features whose rows lie apart (Monolith's
// buffers: each feature has its own rows) are summed side by side, each straight from its cells. If
// too many features share rows for that, ids are filed by row first (ops_layout_grad_impl.h).
template <class T>
class Backward {
 public:
  Backward(const GradRows<T>& grads, const LayoutBuffers& buffers, int threads)
      : grads_(grads),
        plan_(grads.plan),
        index_(grads.index),
        space_(buffers),
        finder_(grads.index, buffers),
        threads_(threads) {}

  bool run() {
    if (!measure()) return false;
    const std::vector<std::int64_t> heads = group();
    if (heads.empty()) {
      FiledSum<T>(grads_, space_, finder_, threads_).run();
      return true;
    }
    Pool::instance().run(static_cast<std::int64_t>(heads.size()), threads_,
                         [&](std::int64_t item, int) {
                           sum_group(heads[static_cast<std::size_t>(item)], item == 0);
                         });
    return true;
  }

 private:
  const GradRows<T>& grads_;
  const LayoutPlanView& plan_;
  const LayoutIndexView& index_;
  const AddressSpace space_;
  const RowFinder<T> finder_;
  const int threads_;
  std::vector<Extent> extents_;           // by start, disjoint after group()
  std::vector<std::int64_t> leaders_;     // of each feature: the first one of its group
  std::vector<std::int64_t> ids_;         // of each feature
  struct Group {
    std::vector<std::int64_t> features;
    std::vector<std::size_t> extents;
  };
  std::vector<Group> groups_;  // of each leader

  // Checks all rows and finds each feature's extents.
  bool measure() {
    const std::size_t buffers = space_.data.size();
    std::vector<std::vector<Extent>> found(static_cast<std::size_t>(plan_.n_features));
    ids_.assign(found.size(), 0);
    std::atomic<bool> good{true};
    Pool::instance().run(plan_.n_features, threads_, [&](std::int64_t f, int) {
      const PlanFeature& feature = plan_.features[f];
      const LayoutCells& cells = index_.cells[f];
      if (!grads_.works(f)) return;
      std::vector<Extent> own(buffers, Extent{INT64_MAX, 0, f});
      const std::int64_t end = index_.splits[cells.first + cells.count];
      for (std::int64_t id = index_.splits[cells.first]; id < end; ++id) {
        if (finder_.find(id, feature.high) == nullptr) {
          good = false;
          return;
        }
        Extent& extent = own[static_cast<std::size_t>(index_.buffers[id])];
        extent.start = std::min(extent.start, index_.rows[id]);
        extent.stop = std::max(extent.stop, index_.rows[id] + feature.high);
      }
      ids_[static_cast<std::size_t>(f)] = end - index_.splits[cells.first];
      for (std::size_t m = 0; m < buffers; ++m) {
        const std::int64_t begin = space_.begins[m];
        if (own[m].start == INT64_MAX) continue;
        found[static_cast<std::size_t>(f)].push_back(
            {begin + own[m].start, begin + own[m].stop, f});
      }
    });
    for (const auto& own : found) extents_.insert(extents_.end(), own.begin(), own.end());
    return good;
  }

  std::int64_t leader_of(std::int64_t f) {
    while (leaders_[static_cast<std::size_t>(f)] != f) f = leaders_[static_cast<std::size_t>(f)];
    return f;
  }

  // Leaders of the groups of features that share no rows with others; none when one group is too
  // much of the work for one thread.
  std::vector<std::int64_t> group() {
    std::sort(extents_.begin(), extents_.end(),
              [](const Extent& a, const Extent& b) { return a.start < b.start; });
    leaders_.resize(static_cast<std::size_t>(plan_.n_features));
    std::iota(leaders_.begin(), leaders_.end(), 0);
    std::vector<Extent> merged;
    for (const Extent& extent : extents_) {
      if (merged.empty() || extent.start >= merged.back().stop) {
        merged.push_back(extent);
        continue;
      }
      merged.back().stop = std::max(merged.back().stop, extent.stop);
      const std::int64_t a = leader_of(merged.back().feature);
      const std::int64_t b = leader_of(extent.feature);
      leaders_[static_cast<std::size_t>(std::max(a, b))] = std::min(a, b);
    }
    extents_ = std::move(merged);
    groups_.resize(leaders_.size());
    for (std::size_t e = 0; e < extents_.size(); ++e) {
      groups_[static_cast<std::size_t>(leader_of(extents_[e].feature))].extents.push_back(e);
    }
    std::int64_t total = 0, most = 0;
    std::vector<std::int64_t> heads, work(leaders_.size(), 0);
    for (std::int64_t f = 0; f < plan_.n_features; ++f) {
      const auto leader = static_cast<std::size_t>(leader_of(f));
      groups_[leader].features.push_back(f);
      work[leader] += ids_[static_cast<std::size_t>(f)];
      total += ids_[static_cast<std::size_t>(f)];
      most = std::max(most, work[leader]);
      if (leader == static_cast<std::size_t>(f)) heads.push_back(f);
    }
    if (threads_ > 1 && most * threads_ > 2 * total) heads.clear();
    return heads;
  }

  void sum_group(std::int64_t leader, bool first) const {
    const Group& group = groups_[static_cast<std::size_t>(leader)];
    // An extent's owner zeroes up to the next extent; the first group also what lies before.
    if (first) space_.template zero<T>(0, extents_.empty() ? space_.end() : extents_[0].start);
    for (const std::size_t e : group.extents) {
      const bool last = e + 1 == extents_.size();
      space_.template zero<T>(extents_[e].start, last ? space_.end() : extents_[e + 1].start);
    }
    std::vector<T> laid;
    for (const std::int64_t f : group.features) sum_feature(f, laid);
  }

  void sum_feature(std::int64_t f, std::vector<T>& laid) const {
    const PlanFeature& feature = plan_.features[f];
    const LayoutCells& cells = index_.cells[f];
    if (!grads_.works(f)) return;
    const std::int64_t* splits = index_.splits + cells.first;
    const PlanSlice& slice = plan_.slices[feature.first];
    if (feature.last - feature.first == 1 && cells.shared == 0) {
      const T* grad = static_cast<const T*>(grads_.grads[static_cast<std::size_t>(slice.output)]);
      if (grad == nullptr) return;
      add_cells(feature, splits, cells.count, {grad + slice.place, slice.stride, slice.step, true});
      return;
    }
    const std::int64_t floats = grads_.cell_floats(f);
    const std::int64_t many = std::max<std::int64_t>(
        kLaidBytes / (floats * static_cast<std::int64_t>(sizeof(T))), 1);
    for (std::int64_t b = 0; b < cells.count; b += many) {
      const std::int64_t count = std::min(many, cells.count - b);
      laid.resize(std::max(laid.size(), static_cast<std::size_t>(count * floats)));
      grads_.lay(f, b, count, laid.data());
      const std::int64_t width = feature.high - feature.low;
      add_cells(feature, splits + b, count, {laid.data(), floats, width, false});
    }
  }

  // Cells' gradients: `stride` floats from cell to cell, `step` from one firstn step to the next.
  struct CellGrads {
    const T* from;
    std::int64_t stride, step;
    bool raw;  // not scaled yet
  };

  // Adds each cell's gradient to the rows of its ids.
  void add_cells(const PlanFeature& feature, const std::int64_t* splits, std::int64_t cells,
                 CellGrads grads) const {
    const std::int64_t width = feature.high - feature.low;
    const bool first_n = feature.pooling == kFirstN;
    const std::int64_t end = splits[cells];
    std::int64_t next = splits[0];
    for (std::int64_t c = 0; c < cells; ++c, grads.from += grads.stride) {
      std::int64_t stop = splits[c + 1];
      const T factor = grads.raw ? grads_.factor(feature, stop - splits[c]) : T(1);
      for (; next < std::min(stop + kAhead, end); ++next) {
        prefetch_lines(row_of(next) + feature.low, width * static_cast<std::int64_t>(sizeof(T)));
      }
      if (first_n) stop = std::min(stop, splits[c] + feature.length);
      const T* part = grads.from;
      for (std::int64_t id = splits[c]; id < stop; ++id, part += first_n ? grads.step : 0) {
        T* row = row_of(id) + feature.low;
        if (factor == T(1)) {
          add_floats(row, part, width);
        } else {
          add_scaled(row, part, factor, width);
        }
      }
    }
  }

  T* row_of(std::int64_t id) const {
    return static_cast<T*>(space_.data[static_cast<std::size_t>(index_.buffers[id])]) +
           index_.rows[id];
  }
};

}  // namespace

template <class T>
bool layout_backward(const LayoutPlanView& plan, const LayoutIndexView& index,
                     const std::vector<void*>& grads, double scale, const LayoutBuffers& buffers,
                     int threads) {
  if (!layout_cells_fit(plan, index)) return false;
  const GradRows<T> rows(plan, index, grads, static_cast<T>(scale));
  return Backward<T>(rows, buffers, threads).run();
}

template bool layout_backward<float>(const LayoutPlanView&, const LayoutIndexView&,
                                     const std::vector<void*>&, double, const LayoutBuffers&, int);
template bool layout_backward<double>(const LayoutPlanView&, const LayoutIndexView&,
                                      const std::vector<void*>&, double, const LayoutBuffers&,
                                      int);

}  // namespace shoal
