#pragma once
// Summing gradients per row and stepping it. Included by kernels_isa.cpp only.
//
// Grouping needs no hash table: while a part is grouped, the version of a row met before holds the
// row's number in the part's list. A version v belongs to a row met before exactly when entry v of
// the list is that row, whatever v was before. Stepping stamps the version; skipping restores it.
#include <cmath>

#include "kernels.h"
#include "prefetch.h"
#include "rows_impl.h"
#include "rules_impl.h"

namespace shoal {
namespace {

constexpr std::uint32_t kAhead = 32;  // rows under way; a power of two
// Gradients of a wide output lie pages apart: more of them would not fit the sets they share.
constexpr std::uint32_t kGradsAhead = 8;

inline std::uint32_t item_at(const Items& items, std::uint32_t k) {
  return items.order == nullptr ? k : items.order[k];
}
inline const Source& source_at(const ApplyJob& job, const Items& items, std::uint32_t e) {
  return job.sources[items.sources == nullptr ? 0 : items.sources[e]];
}
inline std::uint32_t bag_at(const Source& source, const Items& items, std::uint32_t e) {
  return items.bags == nullptr ? e - source.item_start : items.bags[e];
}

// Adds what item e contributes to its row, whatever the pooling, weights and slices.
template <class T>
inline void add_item(const ApplyJob& job, const Items& items, std::uint32_t e, T* acc) {
  const Source& source = source_at(job, items, e);
  const std::uint32_t bag = bag_at(source, items, e);
  const std::int64_t position = source.first + (e - source.item_start);
  T factor = static_cast<T>(source.scale);
  if (source.weights != nullptr) factor *= static_cast<T>(source.weights[position]);
  std::int64_t lane = 0;
  if ((source.pool.pooling & ~kByRow) == kMean) {
    factor /= static_cast<T>(
        std::max<std::int64_t>(source.offsets[bag + 1] - source.offsets[bag], 1));
  } else if (source.pool.pooling == kFirstN) {
    lane = position - source.offsets[bag];
    if (lane < 0 || lane >= source.pool.length) return;
  }
  for (std::int64_t k = 0; k < source.pool.n_slices; ++k) {
    const PlanSlice& s = source.pool.slices[k];
    const T* g = static_cast<const T*>(source.grads[s.output]) +
                 static_cast<std::int64_t>(bag) * s.stride + s.place + lane * s.step;
    T* to = acc + s.start;
    for (std::int64_t i = 0; i < s.width; ++i) to[i] += g[i] * factor;
  }
}

// Occurrences item e stands for: its ticket's count, once a step.
inline std::int64_t occurrences_of(const ApplyJob& job, const Items& items, std::uint32_t e) {
  if (!job.counted) return 1;
  const Source& source = source_at(job, items, e);
  if (!source.counted_once) return 0;
  return source.counts == nullptr ? 1 : source.counts[source.first + (e - source.item_start)];
}

// The version of item k's row; of no row, `none`.
__attribute__((always_inline)) inline std::uint32_t* touch_version(const RowView& v,
                                                                   const Items& items,
                                                                   std::uint32_t k,
                                                                   std::uint32_t* none) {
  const std::int32_t row = items.rows[item_at(items, k)];
  std::uint32_t* at = row < 0 ? none : &row_version(v, static_cast<std::uint32_t>(row));
  __builtin_prefetch(at, 1, 2);
  return at;
}

// Calls met(k, u) for each item k of a row, with the row's place in the list; new rows are listed
// first, by fresh(k, u). Returns how many rows there are.
template <class Fresh, class Met>
__attribute__((always_inline)) inline std::uint32_t number_rows(const ApplyJob& job,
                                                                const Items items,
                                                                const ApplyScratch s,
                                                                const Fresh& fresh,
                                                                const Met& met) {
  const RowView v = job.table.rows;
  std::uint32_t* ring[kAhead];
  std::uint32_t none = 0, unique = 0;
  for (std::uint32_t k = 0; k < kAhead && k < items.n; ++k) {
    ring[k] = touch_version(v, items, k, &none);
  }
  for (std::uint32_t k = 0; k < items.n; ++k) {
    std::uint32_t* const version = ring[k % kAhead];
    if (k + kAhead < items.n) ring[k % kAhead] = touch_version(v, items, k + kAhead, &none);
    const std::int32_t row = items.rows[item_at(items, k)];
    if (row < 0) continue;
    std::uint32_t u = *version;
    if (u >= unique || s.rows[u] != row) {
      s.rows[unique] = row;
      s.versions[unique] = u;
      *version = u = unique++;
      fresh(k, u);
    }
    met(k, u);
  }
  return unique;
}

// Lists the part's rows, and sums their gradients in scratch; returns how many.
template <class T>
std::uint32_t sum_rows(const ApplyJob& job, const Items items, const ApplyScratch s) {
  const int d = job.table.rows.dim;
  const auto sum = [&](std::uint32_t u) {
    return reinterpret_cast<T*>(s.sums + std::size_t{u} * s.sum_stride);
  };
  const auto fresh = [&](std::uint32_t k, std::uint32_t u) {
    s.heads[u] = item_at(items, k);
    s.counts[u] = 0;
    std::fill_n(sum(u), d, T(0));
  };
  return number_rows(job, items, s, fresh, [&](std::uint32_t k, std::uint32_t u) {
    const std::uint32_t e = item_at(items, k);
    add_item(job, items, e, sum(u));
    s.counts[u] += occurrences_of(job, items, e);
  });
}

// Lists the part's rows, and their items row by row; returns how many rows.
inline std::uint32_t sort_rows(const ApplyJob& job, const Items items, const ApplyScratch s) {
  const std::uint32_t unique = number_rows(
      job, items, s, [&](std::uint32_t, std::uint32_t u) { s.stops[u] = 0; },
      [&](std::uint32_t k, std::uint32_t u) {
        s.numbers[k] = u;
        ++s.stops[u];
      });
  std::uint32_t at = 0;
  for (std::uint32_t u = 0; u < unique; ++u) at += std::exchange(s.stops[u], at);
  for (std::uint32_t k = 0; k < items.n; ++k) {
    const std::uint32_t e = item_at(items, k);
    if (items.rows[e] >= 0) s.sorted[s.stops[s.numbers[k]]++] = e;
  }
  return unique;
}

// Gradients of listed rows: summed when their row's turn comes, or before.
template <class T>
struct RowGrads {
  const ApplyJob& job;
  const Source* sources;  // the job's, or one of sums
  const Items items;
  const ApplyScratch s;
  const std::uint32_t n;  // items of all rows
  const std::size_t bytes;

  std::uint32_t start(std::uint32_t u) const { return u == 0 ? 0 : s.stops[u - 1]; }
  const T* place(std::uint32_t i) const {
    const std::uint32_t e = s.sorted[i];
    const Source& source = sources[items.sources == nullptr ? 0 : items.sources[e]];
    return reinterpret_cast<const T*>(source.direct +
                                      bag_at(source, items, e) * source.direct_stride);
  }
  __attribute__((always_inline)) const T* item(std::uint32_t i) const {
    if (i + kGradsAhead < n) prefetch_row(place(i + kGradsAhead), bytes);
    return place(i);
  }
  // Sums kLines cache lines of the items' gradients from byte `at` on, one after the other.
  template <int kLines>
  __attribute__((always_inline)) void sum_lines(std::uint32_t first, std::uint32_t stop,
                                                std::size_t at) const {
    typedef T Vector __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
    const auto line = [at](const T* g, int k) -> const Vector& {
      return reinterpret_cast<const Vector*>(reinterpret_cast<const char*>(g) + at)[k];
    };
    Vector sums[kLines];
    for (int k = 0; k < kLines; ++k) sums[k] = line(place(first), k);
    for (std::uint32_t i = first + 1; i < stop; ++i) {
      const T* const g = at == 0 ? item(i) : place(i);
      for (int k = 0; k < kLines; ++k) sums[k] += line(g, k);
    }
    for (int k = 0; k < kLines; ++k) reinterpret_cast<Vector*>(s.temp + at)[k] = sums[k];
  }
  // The gradient of a row with one item where it lies.
  T* at(std::uint32_t u) const {
    const std::uint32_t first = start(u), stop = s.stops[u];
    const T* const only = item(first);
    if (stop == first + 1) return const_cast<T*>(only);
    std::size_t at = 0;
    for (; at + 256 <= bytes; at += 256) sum_lines<4>(first, stop, at);
    for (; at + 64 <= bytes; at += 64) sum_lines<1>(first, stop, at);
    T* const sum = reinterpret_cast<T*>(s.temp);
    for (std::size_t k = at / sizeof(T); k < bytes / sizeof(T); ++k) {
      sum[k] = only[k];
      for (std::uint32_t i = first + 1; i < stop; ++i) sum[k] += place(i)[k];
    }
    return sum;
  }
  std::int64_t count(std::uint32_t u) const {
    if (!job.in_place) return s.counts[u];
    const std::uint32_t first = start(u), stop = s.stops[u];
    if (!job.counted) return stop - first;
    std::int64_t total = 0;
    for (std::uint32_t i = first; i < stop; ++i) total += occurrences_of(job, items, s.sorted[i]);
    return total;
  }
};

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

// A row under way: where its parts lie.
struct RowPlace {
  char* weights;
  char* state;
  std::uint32_t* version;
  LastSeen* seen;
};

__attribute__((always_inline)) inline RowPlace place_row(const RowView& v, std::int32_t number,
                                                         std::size_t weights,
                                                         std::size_t state) {
  const auto row = static_cast<std::uint32_t>(number);
  const BlockView& block = block_view(v, row);
  const RowPlace place{block.weights + std::size_t{row} * v.weight_stride,
                       block.state + std::size_t{row} * v.state_stride,
                       reinterpret_cast<std::uint32_t*>(block.versions + std::size_t{row} * 4),
                       reinterpret_cast<LastSeen*>(block.seen + std::size_t{row} * 8)};
  prefetch_write(place.weights, weights);
  prefetch_write(place.state, state);
  __builtin_prefetch(place.version, 1, 2);
  __builtin_prefetch(place.seen, 1, 2);
  return place;
}

inline void stamp(const StepParams& step, const RowPlace& place, std::int64_t count) {
  *place.version = step.version;
  LastSeen seen = *place.seen;
  if (step.event_time_s > seen.seconds) seen.seconds = step.event_time_s;
  const std::int64_t total = seen.count + count;
  seen.count = total > 0xffffffffLL ? 0xffffffffU : static_cast<std::uint32_t>(total);
  *place.seen = seen;
}

// Runs body(u, place, gradient) for every row of the list, rows on their way kAhead before.
template <class T, class Body>
__attribute__((always_inline)) inline void each_row(const ApplyJob& job, const ApplyScratch s,
                                                    std::uint32_t unique,
                                                    const RowGrads<T>& grads,
                                                    const Body& body) {
  const RowView v = job.table.rows;
  const std::size_t weights = weight_bytes(v), state = state_bytes(v);
  RowPlace ring[kAhead];
  for (std::uint32_t i = 0; i < kGradsAhead && i < grads.n; ++i) {
    prefetch_row(grads.place(i), grads.bytes);
  }
  for (std::uint32_t u = 0; u < kAhead && u < unique; ++u) {
    ring[u] = place_row(v, s.rows[u], weights, state);
  }
  for (std::uint32_t u = 0; u < unique; ++u) {
    const RowPlace place = ring[u % kAhead];
    if (u + kAhead < unique) {
      ring[u % kAhead] = place_row(v, s.rows[u + kAhead], weights, state);
    }
    body(u, place, grads.at(u));
  }
}

// One segment of fp32 or fp64 columns, gradients as they are: what most tables are.
template <class T, StepFunction<T> kStep>
void step_plain_rows(const ApplyJob& job, const ApplyScratch s, std::uint32_t unique,
                     const RowGrads<T>& grads) {
  const RuleConstants<T> constants(job.table.segments[0].rule);
  const StepParams step = job.step;
  const T lr = static_cast<T>(job.lrs[0]);
  const int d = job.table.rows.dim;
  each_row<T>(job, s, unique, grads, [&](std::uint32_t u, const RowPlace& place, const T* g) {
    kStep(RuleStep<T>{constants.params, reinterpret_cast<T*>(place.weights),
                      reinterpret_cast<T*>(place.state), g, d, lr, step.global_step});
    stamp(step, place, grads.count(u));
  });
}

// One row of any table: retrievers, delay compensation, several segments, narrow storage.
template <class T>
void step_any_row(const ApplyJob& job, std::uint32_t row, const RowPlace& place, T* g, T* temp,
                  const T* seen) {
  const TableView& t = job.table;
  const bool narrow = t.rows.dtype != DType::f32 && t.rows.dtype != DType::f64;
  T* w = reinterpret_cast<T*>(place.weights);
  if (narrow) {
    w = temp;
    load_weights(t.rows.dtype, place.weights, w, t.rows.dim);
  }
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
    const RuleConstants<T> constants(s.rule);
    const RuleStep<T> a{constants.params, ws, reinterpret_cast<T*>(place.state) + s.state_column, gs,
                        s.dim, static_cast<T>(job.lrs[k]), job.step.global_step};
    with_rule<T>(s.rule.kind, [&](auto rule) { rule.value(a); });
  }
  if constexpr (sizeof(T) == 4) {
    if (t.rows.dtype == DType::i8) {
      store_nearest(t.rows.dtype, w, place.weights, t.rows.dim);
    } else if (narrow) {
      const RowMaker maker{t.segments, t.n_segments, t.key, t.first_column};
      store_stochastic(maker, t.rows.dtype, row_id(t.rows, row), job.step.global_step, w,
                       place.weights, t.rows.dim);
    }
  }
}

template <class T>
std::int64_t step_any_rows(const ApplyJob& job, const Items& items, const ApplyScratch& s,
                           std::uint32_t unique, const RowGrads<T>& grads) {
  const int d = job.table.rows.dim;
  std::int64_t skipped = 0;
  // Never the caller's g changes: only a job whose rules just read gradients reads them in place.
  each_row<T>(job, s, unique, grads, [&](std::uint32_t u, const RowPlace& place, T* g) {
    if (job.step.nan_policy != 0 && !accept(job.step, g, d)) {
      *place.version = s.versions[u];
      ++skipped;
      return;
    }
    if (job.keeper.keep != nullptr && job.step.nan_policy != 0) {
      job.keeper.keep(job.keeper.context, job.table.rows, s.rows + u, s.versions + u, 1);
    }
    const T* seen = nullptr;
    if (!job.in_place) {
      const std::uint32_t head = s.heads[u];
      const Source& source = source_at(job, items, head);
      if (source.seen != nullptr) {
        seen = static_cast<const T*>(source.seen) +
               static_cast<std::int64_t>(head - source.item_start) * d;
      }
    }
    step_any_row(job, static_cast<std::uint32_t>(s.rows[u]), place, g,
                 reinterpret_cast<T*>(s.temp), seen);
    stamp(job.step, place, grads.count(u));
  });
  return skipped;
}

template <class T>
std::int64_t apply_typed(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  // Of a small table nothing is in the caches; these are needed once its rows are numbered.
  __builtin_prefetch(job.table.rows.maxima, 1, 2);
  prefetch_row(job.table.segments, sizeof(Segment));
  const std::uint32_t unique =
      job.in_place ? sort_rows(job, items, s) : sum_rows<T>(job, items, s);
  // Apart from the steps, where it cost 8 % of those of 16 columns; here it costs 1 %. A row that is
  // skipped below raises its maximum too, which only has it looked at.
  for (std::uint32_t u = 0; u < unique; ++u) {
    raise_maximum(row_maximum(job.table.rows, static_cast<std::uint32_t>(s.rows[u])),
                  job.step.version);
  }
  // A row that is skipped does not change, so there each is kept when that is known.
  if (job.keeper.keep != nullptr && job.step.nan_policy == 0) {
    job.keeper.keep(job.keeper.context, job.table.rows, s.rows, s.versions, unique);
  }
  Source sums{};
  sums.direct = s.sums;
  sums.direct_stride = static_cast<std::int64_t>(s.sum_stride);
  const Items listed{s.rows, nullptr, nullptr, nullptr, unique};
  for (std::uint32_t u = 0; !job.in_place && u < unique; ++u) {
    s.sorted[u] = u;
    s.stops[u] = u + 1;
  }
  const RowGrads<T> grads{job, job.in_place ? job.sources : &sums, job.in_place ? items : listed, s,
                          unique == 0 ? 0 : s.stops[unique - 1],
                          static_cast<std::size_t>(job.table.rows.dim) * sizeof(T)};
  const bool compensated = job.table.segments[0].rule.delay_compensated;
  if (!job.table.plain || job.table.n_segments != 1 || compensated || job.step.nan_policy != 0) {
    return step_any_rows<T>(job, items, s, unique, grads);
  }
  with_rule<T>(job.table.segments[0].rule.kind,
               [&](auto rule) { step_plain_rows<T, rule.value>(job, s, unique, grads); });
  return 0;
}

template <class T>
std::uint32_t sum_typed(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  const std::uint32_t unique = sum_rows<T>(job, items, s);
  for (std::uint32_t u = 0; u < unique; ++u) {
    row_version(job.table.rows, static_cast<std::uint32_t>(s.rows[u])) = s.versions[u];
  }
  return unique;
}

}  // namespace
}  // namespace shoal
