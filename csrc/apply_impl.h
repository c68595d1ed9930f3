#pragma once
// Summing gradients per row and stepping it. Included by kernels_isa.cpp only.
#include <cmath>

#include "kernels.h"
#include "rows_impl.h"
#include "rules_impl.h"

namespace shoal {
namespace {

constexpr std::uint32_t kNoItem = 0xffffffffU;

// Chains the items of each row in input order; returns the number of unique rows.
inline std::uint32_t group_items(const Item* items, std::uint32_t m, ApplyScratch& s) {
  for (std::uint32_t i = 0; i <= s.slot_mask; ++i) s.slots[2 * i] = -1;
  std::uint32_t unique = 0;
  for (std::uint32_t e = 0; e < m; ++e) {
    const std::int32_t row = items[e].row;
    s.next[e] = kNoItem;
    std::uint32_t at = (static_cast<std::uint32_t>(row) * 0x9E3779B9U >> 7) & s.slot_mask;
    while (s.slots[2 * at] != -1 && s.slots[2 * at] != row) at = (at + 1) & s.slot_mask;
    if (s.slots[2 * at] == row) {
      const auto u = static_cast<std::uint32_t>(s.slots[2 * at + 1]);
      s.next[s.tail[u]] = e;
      s.tail[u] = e;
      ++s.number[u];
    } else {
      s.slots[2 * at] = row;
      s.slots[2 * at + 1] = static_cast<std::int32_t>(unique);
      s.head[unique] = e;
      s.tail[unique] = e;
      s.number[unique] = 1;
      ++unique;
    }
  }
  return unique;
}

template <class T>
inline const T* grad_at(const Source& source, const Slice& s, const Item& item) {
  return static_cast<const T*>(source.grads[s.output]) +
         static_cast<std::int64_t>(item.bag) * source.widths[s.output] + s.column;
}

template <class T>
inline void add_item(const Source& source, const Item& item, T* acc) {
  const std::int64_t position = source.first + item.position;
  T factor = static_cast<T>(source.scale);
  if (source.weights != nullptr) factor *= static_cast<T>(source.weights[position]);
  std::int64_t lane = 0;
  if (source.pool.pooling == Pooling::mean) {
    factor /= static_cast<T>(source.offsets[item.bag + 1] - source.offsets[item.bag]);
  } else if (source.pool.pooling == Pooling::first_n) {
    lane = position - source.offsets[item.bag];
    if (lane >= source.pool.length) return;
  }
  for (int k = 0; k < source.pool.n_slices; ++k) {
    const Slice& s = source.pool.slices[k];
    const int n = s.stop - s.start;
    const T* g = grad_at<T>(source, s, item) + lane * n;
    T* to = acc + s.start;
    for (int i = 0; i < n; ++i) to[i] += g[i] * factor;
  }
}

constexpr int kChainAhead = 4;

template <class T>
__attribute__((always_inline)) inline void prefetch_grad(const ApplyJob& job, const Item& item) {
  const Source& source = job.sources[item.source];
  const Slice& s = source.pool.slices[0];
  prefetch_bytes(reinterpret_cast<const char*>(grad_at<T>(source, s, item)),
                 static_cast<std::size_t>(s.stop - s.start) * sizeof(T));
}

// Rows of a hot id lie all over the gradient; walking its chain ahead of the sum hides that.
template <class T>
inline void sum_items(const ApplyJob& job, const Item* items, std::uint32_t e,
                      const ApplyScratch& scratch, T* acc) {
  const int d = job.table.rows.dim;
  for (int i = 0; i < d; ++i) acc[i] = 0;
  std::uint32_t ahead = e;
  for (int i = 0; i < kChainAhead && ahead != kNoItem; ++i) ahead = scratch.next[ahead];
  for (; e != kNoItem; e = scratch.next[e]) {
    if (ahead != kNoItem) {
      prefetch_grad<T>(job, items[ahead]);
      ahead = scratch.next[ahead];
    }
    const Item& item = items[e];
    const Source& source = job.sources[item.source];
    if (source.direct) {
      const T* g = grad_at<T>(source, source.pool.slices[0], item);
#pragma GCC ivdep
      for (int i = 0; i < d; ++i) acc[i] += g[i];
    } else {
      add_item(source, item, acc);
    }
  }
}

inline std::int64_t count_items(const ApplyJob& job, const Item* items, std::uint32_t u,
                                const ApplyScratch& scratch) {
  if (!job.counted) return scratch.number[u];
  std::int64_t count = 0;
  for (std::uint32_t e = scratch.head[u]; e != kNoItem; e = scratch.next[e]) {
    const Source& source = job.sources[items[e].source];
    if (!source.sighted) continue;
    count += source.counts == nullptr ? 1 : source.counts[source.first + items[e].position];
  }
  return count;
}

// Applies the policy to a summed gradient; false leaves the row alone.
template <class T>
inline bool accept(const StepParams& step, T* g, int d) {
  bool good = true;
  for (int i = 0; i < d; ++i) good &= std::fabs(g[i]) <= std::numeric_limits<T>::max();
  if (good) return true;
  if (step.nan_policy != 2) return false;
  const T clip = static_cast<T>(step.nan_clip);
  for (int i = 0; i < d; ++i) {
    if (std::isnan(g[i])) {
      g[i] = 0;
    } else if (std::isinf(g[i])) {
      g[i] = g[i] > 0 ? clip : -clip;
    }
  }
  return true;
}

template <class T>
inline void step_row(const ApplyJob& job, std::uint32_t row, T* g, T* temp, const T* seen) {
  const TableView& t = job.table;
  const bool narrow = t.rows.dtype == DType::f16 || t.rows.dtype == DType::bf16;
  char* stored = weight_row(t.rows, row);
  T* w = reinterpret_cast<T*>(stored);
  if (narrow) {
    w = temp;
    load_weights(t.rows.dtype, stored, w, t.rows.dim);
  }
  T* state = t.rows.state_width > 0 ? reinterpret_cast<T*>(state_row(t.rows, row)) : nullptr;
  for (int k = 0; k < t.n_segments; ++k) {
    const Segment& s = t.segments[k];
    T* gs = g + s.column;
    T* ws = w + s.column;
    if (!t.plain) retrieve_backward(s, job.step.global_step, ws, gs);
    if (s.rule.delay_compensated && seen != nullptr) {
      const T strength = static_cast<T>(s.rule.strength);
      for (int i = 0; i < s.dim; ++i) {
        gs[i] += strength * gs[i] * gs[i] * (ws[i] - seen[s.column + i]);
      }
    }
    rule_step(RuleStep<T>{&s.rule, ws, state + s.state_column, gs, s.dim,
                          static_cast<T>(job.lrs[k]), job.step.global_step});
  }
  if constexpr (sizeof(T) == 4) {
    if (narrow) {
      store_stochastic(RowMaker{t.segments, t.n_segments, t.key}, t.rows.dtype,
                       row_id(t.rows, row), job.step.global_step, w, stored, t.rows.dim);
    }
  }
}

inline void stamp(const ApplyJob& job, std::uint32_t row, std::int64_t count) {
  row_version(job.table.rows, row) = job.step.epoch;
  LastSeen& seen = row_seen(job.table.rows, row);
  if (job.step.event_time_s > seen.seconds) seen.seconds = job.step.event_time_s;
  const std::int64_t total = seen.count + count;
  seen.count = total > 0xffffffffLL ? 0xffffffffU : static_cast<std::uint32_t>(total);
}

// Forced inline: a function that only prefetches counts as free of effects, and GCC drops its calls.
__attribute__((always_inline)) inline void prefetch_write(const char* p, std::size_t bytes) {
  const std::size_t limit = bytes < 512 ? bytes : 512;
  for (std::size_t at = 0; at < limit; at += 64) __builtin_prefetch(p + at, 1, 2);
}

template <class T>
__attribute__((always_inline)) inline void prefetch_unique(const ApplyJob& job, const Item* items,
                                                           std::uint32_t e,
                                                           const ApplyScratch& scratch) {
  const RowView& v = job.table.rows;
  const auto row = static_cast<std::uint32_t>(items[e].row);
  prefetch_write(weight_row(v, row), static_cast<std::size_t>(v.dim) * element_size(v.dtype));
  if (v.state_width > 0) {
    prefetch_write(state_row(v, row), static_cast<std::size_t>(v.state_width) * sizeof(T));
  }
  __builtin_prefetch(&row_version(v, row), 1, 2);
  __builtin_prefetch(&row_seen(v, row), 1, 2);
  for (int i = 0; i < kChainAhead && e != kNoItem; ++i, e = scratch.next[e]) {
    prefetch_grad<T>(job, items[e]);
  }
}

template <class T>
std::int64_t apply_typed(const ApplyJob& job, const Item* items, std::uint32_t m,
                         ApplyScratch& scratch) {
  constexpr std::uint32_t kAhead = 32;
  const int d = job.table.rows.dim;
  T* acc = static_cast<T*>(scratch.buffer);
  T* temp = acc + d + 16;
  const std::uint32_t unique = group_items(items, m, scratch);
  std::int64_t skipped = 0;
  for (std::uint32_t u = 0; u < kAhead && u < unique; ++u) {
    prefetch_unique<T>(job, items, scratch.head[u], scratch);
  }
  for (std::uint32_t u = 0; u < unique; ++u) {
    if (u + kAhead < unique) {
      prefetch_unique<T>(job, items, scratch.head[u + kAhead], scratch);
    }
    const std::uint32_t head = scratch.head[u];
    const Item& item = items[head];
    const Source& source = job.sources[item.source];
    const auto row = static_cast<std::uint32_t>(item.row);
    if (scratch.number[u] == 1 && source.direct && job.step.nan_policy == 0 && job.table.plain) {
      // The rule only reads a gradient that nothing else changes, so it may read the user's.
      T* g = const_cast<T*>(grad_at<T>(source, source.pool.slices[0], item));
      step_row<T>(job, row, g, temp, nullptr);
    } else {
      sum_items(job, items, head, scratch, acc);
      if (job.step.nan_policy != 0 && !accept(job.step, acc, d)) {
        ++skipped;
        continue;
      }
      const T* seen = source.seen == nullptr
                          ? nullptr
                          : static_cast<const T*>(source.seen) +
                                static_cast<std::int64_t>(item.position) * d;
      step_row<T>(job, row, acc, temp, seen);
    }
    stamp(job, row, count_items(job, items, u, scratch));
  }
  return skipped;
}

template <class T>
std::uint32_t sum_typed(const ApplyJob& job, const Item* items, std::uint32_t m,
                        ApplyScratch& scratch, SumOut* out) {
  if (out == nullptr) return group_items(items, m, scratch);
  T* sums = static_cast<T*>(out->sums);
  for (std::uint32_t u = 0; u < out->unique; ++u) {
    out->rows[u] = items[scratch.head[u]].row;
    out->counts[u] = count_items(job, items, u, scratch);
    sum_items(job, items, scratch.head[u], scratch,
              sums + static_cast<std::int64_t>(u) * job.table.rows.dim);
  }
  return out->unique;
}

}  // namespace
}  // namespace shoal
