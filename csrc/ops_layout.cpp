#include "ops_layout.h"

#include <algorithm>
#include <atomic>

#include "ops_layout_impl.h"
#include "threads.h"

namespace shoal {

bool layout_cells_fit(const LayoutPlanView& plan, const LayoutIndexView& index) {
  std::int64_t bad = index.splits[0] != 0 || index.splits[index.n_cells] != index.n;
  for (std::int64_t c = 0; c < index.n_cells; ++c) bad += index.splits[c] > index.splits[c + 1];
  for (std::size_t r = 0; r < index.batch_sizes.size(); ++r) {
    for (std::int64_t f = 0; f < plan.n_features; ++f) {
      const LayoutCells& c = index.cells[static_cast<std::int64_t>(r) * plan.n_features + f];
      const std::int64_t want = c.shared != 0 ? 1 : index.batch_sizes[r];
      bad += c.first < 0 || c.count < 0 || c.count > index.n_cells ||
             c.first > index.n_cells - c.count || (c.count != 0 && c.count != want);
    }
  }
  return bad == 0;
}

namespace {

// Examples of one request that one item lays out.
struct Block {
  std::int64_t request, first, last;  // examples of the request
  std::int64_t out;                   // example of the outputs that `first` is
};

std::vector<Block> blocks_of(const std::vector<std::int64_t>& batch_sizes, int threads) {
  std::int64_t total = 0;
  for (const std::int64_t size : batch_sizes) total += size;
  // Enough blocks for all threads, but not so small that walking the features is most of the work.
  const std::int64_t many = threads > 1 ? (total + 4 * threads - 1) / (4 * threads) : 64;
  const std::int64_t step = std::clamp<std::int64_t>(many, std::min<std::int64_t>(8, total), 64);
  std::vector<Block> blocks;
  std::int64_t out = 0;
  for (std::size_t r = 0; r < batch_sizes.size(); ++r) {
    for (std::int64_t b = 0; b < batch_sizes[r]; b += step) {
      const std::int64_t last = std::min(b + step, batch_sizes[r]);
      blocks.push_back({static_cast<std::int64_t>(r), b, last, out + b});
    }
    out += batch_sizes[r];
  }
  return blocks;
}

// One lane's working memory.
template <class T>
struct Scratch {
  std::vector<const T*> rows;
  std::vector<T> pooled;
};

constexpr std::int64_t kAhead = 16;           // rows touched before they are read
constexpr std::int64_t kPooledBytes = 16384;  // pooled rows that stay in the first-level cache

template <class T>
struct Forward {
  const LayoutPlanView& plan;
  const LayoutIndexView& index;
  const RowFinder<T> finder;
  T* const* outputs;
  const T* zeros;  // as wide as the widest row

  T* output_at(const PlanSlice& slice, std::int64_t example) const {
    return outputs[slice.output] + example * slice.stride + slice.place;
  }

  // Rows of the ids of `cells` cells, and whether all are in range.
  bool find_rows(const PlanFeature& feature, const std::int64_t* splits, std::int64_t cells,
                 std::vector<const T*>& rows) const {
    const std::int64_t start = splits[0];
    const auto count = static_cast<std::size_t>(splits[cells] - start);
    // As many more as lay_first_n reads beyond a cell.
    const std::size_t room = count + static_cast<std::size_t>(feature.length);
    if (rows.size() < room) rows.resize(2 * room);
    bool good = true;
    for (std::size_t i = 0; i < count; ++i) {
      rows[i] = finder.find(start + static_cast<std::int64_t>(i), feature.high);
      good = good && rows[i] != nullptr;
    }
    return good;
  }

  // Rows of the cell after `at`, and some beyond, are on their way when it is read.
  static void touch(const PlanFeature& feature, const T* const* rows, std::int64_t& next,
                    std::int64_t at, std::int64_t end) {
    const std::int64_t until = at + kAhead < end ? at + kAhead : end;
    const auto bytes = (feature.high - feature.low) * static_cast<std::int64_t>(sizeof(T));
    for (; next < until; ++next) {
      prefetch_lines(rows[next] + feature.low, bytes);
    }
  }

  // [cells, high - low]: each cell's rows pooled.
  void pool_cells(const PlanFeature& feature, const std::int64_t* splits, std::int64_t cells,
                  const T* const* rows, T* pooled) const {
    const std::int64_t width = feature.high - feature.low;
    const std::int64_t end = splits[cells] - splits[0];
    std::int64_t next = 0;
    for (std::int64_t c = 0; c < cells; ++c, pooled += width) {
      const std::int64_t at = splits[c] - splits[0];
      const std::int64_t count = splits[c + 1] - splits[c];
      touch(feature, rows, next, at + count, end);
      T* const out = pooled - feature.low;
      if (count == 0) {
        zero_floats(pooled, width);
      } else if (feature.pooling == kMean && count > 1) {
        const T factor = T(1) / static_cast<T>(count);
        pool_rows<true>(rows + at, count, feature.low, feature.high, factor, out);
      } else {
        const T divisor = feature.pooling == kDivided ? static_cast<T>(count) : T(1);
        pool_rows<false>(rows + at, count, feature.low, feature.high, divisor, out);
      }
    }
  }

  // `step` 0 lays the one cell to all examples.
  void lay_pooled(const PlanFeature& feature, const T* pooled, std::int64_t step,
                  std::int64_t example, std::int64_t examples) const {
    for (std::int64_t s = feature.first; s < feature.last; ++s) {
      const PlanSlice& slice = plan.slices[s];
      const std::int64_t width = slice.width;
      const T* from = pooled + slice.start - feature.low;
      T* to = output_at(slice, example);
      for (std::int64_t b = 0; b < examples; ++b, from += step, to += slice.stride) {
        if (slice.adds()) {
          add_floats(to, from, width);
        } else {
          copy_floats(to, from, width);
        }
      }
    }
  }

  // Every row straight to the outputs, in order of id and then of slice.
  void lay_rows(const PlanFeature& feature, const std::int64_t* splits, bool shared,
                const T* const* rows, std::int64_t example, std::int64_t examples) const {
    const std::int64_t end = shared ? 0 : splits[examples] - splits[0];
    std::int64_t next = 0;
    for (std::int64_t b = 0; b < examples; ++b) {
      const std::int64_t* cell = splits + (shared ? 0 : b);
      const std::int64_t count = cell[1] - cell[0];
      const T* const* own = rows + (cell[0] - splits[0]);
      touch(feature, rows, next, cell[1] - splits[0], end);
      const bool mean = feature.pooling == (kByRow | kMean) && count > 1;
      const T factor = mean ? T(1) / static_cast<T>(count) : T(1);
      for (std::int64_t s = feature.first; count == 0 && s < feature.last; ++s) {
        const PlanSlice& slice = plan.slices[s];
        if (!slice.adds()) zero_floats(output_at(slice, example + b), slice.width);
      }
      for (std::int64_t j = 0; j < count; ++j) {
        for (std::int64_t s = feature.first; s < feature.last; ++s) {
          const PlanSlice& slice = plan.slices[s];
          T* to = output_at(slice, example + b);
          if (slice.adds() || j > 0) {
            add_scaled(to, own[j] + slice.start, factor, slice.width);
          } else {
            for (std::int64_t i = 0; i < slice.width; ++i) to[i] = own[j][slice.start + i] * factor;
          }
        }
      }
    }
  }

  void lay_first_n(const PlanFeature& feature, const std::int64_t* splits, bool shared,
                   const T* const* rows, std::int64_t example, std::int64_t examples) const {
    const std::int64_t end = shared ? 0 : splits[examples] - splits[0];
    for (std::int64_t s = feature.first; s < feature.last; ++s) {
      const PlanSlice& slice = plan.slices[s];
      T* to = output_at(slice, example);
      std::int64_t next = s == feature.first ? 0 : end;
      for (std::int64_t b = 0; b < examples; ++b, to += slice.stride) {
        const std::int64_t* cell = splits + (shared ? 0 : b);
        const std::int64_t count = cell[1] - cell[0];
        const T* const* own = rows + (cell[0] - splits[0]);
        touch(feature, rows, next, cell[1] - splits[0], end);
        for (std::int64_t j = 0; j < feature.length; ++j) {
          const T* next_row = own[j];
          const T* row = j < count ? next_row : zeros;
          copy_floats(to + j * slice.step, row + slice.start, slice.width);
        }
      }
    }
  }

  // All examples of the block, some at a time so that pooled rows stay in the cache.
  bool lay_feature(std::int64_t f, const Block& block, Scratch<T>& scratch) const {
    static constexpr std::int64_t kNoIds[2] = {0, 0};
    const PlanFeature& feature = plan.features[f];
    if (feature.first == feature.last) return true;
    const LayoutCells& cells = index.cells[block.request * plan.n_features + f];
    const bool one_cell = cells.shared != 0 || cells.count == 0;
    const std::int64_t width = feature.high - feature.low;
    const std::int64_t most = kPooledBytes / (width * static_cast<std::int64_t>(sizeof(T)));
    const std::int64_t many = one_cell ? block.last - block.first : std::max<std::int64_t>(most, 1);
    for (std::int64_t b = block.first; b < block.last; b += many) {
      const std::int64_t examples = std::min(many, block.last - b);
      const std::int64_t own = one_cell ? 1 : examples;
      const std::int64_t* splits =
          cells.count == 0 ? kNoIds : index.splits + cells.first + (one_cell ? 0 : b);
      if (!find_rows(feature, splits, own, scratch.rows)) return false;
      const T* const* rows = scratch.rows.data();
      const std::int64_t out = block.out + b - block.first;
      if (feature.pooling == kFirstN) {
        lay_first_n(feature, splits, one_cell, rows, out, examples);
        continue;
      }
      if ((feature.pooling & kByRow) != 0) {
        lay_rows(feature, splits, one_cell, rows, out, examples);
        continue;
      }
      const auto floats = static_cast<std::size_t>(own * width);
      if (scratch.pooled.size() < floats) scratch.pooled.resize(floats);
      pool_cells(feature, splits, own, rows, scratch.pooled.data());
      lay_pooled(feature, scratch.pooled.data(), one_cell ? 0 : width, out, examples);
    }
    return true;
  }
};

}  // namespace

template <class T>
bool layout_forward(const LayoutPlanView& plan, const LayoutIndexView& index,
                    const LayoutBuffers& buffers, const std::vector<void*>& outputs, int threads) {
  if (!layout_cells_fit(plan, index)) return false;
  const std::vector<Block> blocks = blocks_of(index.batch_sizes, threads);
  std::vector<T*> targets(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) targets[i] = static_cast<T*>(outputs[i]);
  std::int64_t widest = 0;
  for (std::int64_t f = 0; f < plan.n_features; ++f) {
    widest = std::max(widest, plan.features[f].high);
  }
  const std::vector<T> zeros(static_cast<std::size_t>(widest));
  const Forward<T> forward{plan, index, RowFinder<T>(index, buffers), targets.data(), zeros.data()};
  std::atomic<bool> good{true};
  std::vector<Scratch<T>> scratch(static_cast<std::size_t>(std::max(threads, 1)));
  Pool::instance().run(
      static_cast<std::int64_t>(blocks.size()), threads, [&](std::int64_t item, int lane) {
        const Block& block = blocks[static_cast<std::size_t>(item)];
        for (std::int64_t f = 0; f < plan.n_features; ++f) {
          if (!forward.lay_feature(f, block, scratch[static_cast<std::size_t>(lane)])) good = false;
        }
      });
  return good;
}

template bool layout_forward<float>(const LayoutPlanView&, const LayoutIndexView&,
                                    const LayoutBuffers&, const std::vector<void*>&, int);
template bool layout_forward<double>(const LayoutPlanView&, const LayoutIndexView&,
                                     const LayoutBuffers&, const std::vector<void*>&, int);

}  // namespace shoal
