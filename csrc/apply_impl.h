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

template <class T>
inline const T* direct_grad(const ApplyJob& job, const Items& items, std::uint32_t e) {
  const Source& source = source_at(job, items, e);
  return reinterpret_cast<const T*>(source.direct +
                                    bag_at(source, items, e) * source.direct_stride);
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
  if ((source.pool.pooling & ~kByRow) == kShares) {
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

// Lists the part's rows with their gradients, summed where several items have the row; returns how
// many. A row with one item keeps pointing at the caller's gradient when that is read in place.
template <class T, bool kInPlace>
std::uint32_t group_rows(const ApplyJob& job, const Items items, const ApplyScratch s) {
  const RowView v = job.table.rows;
  const int d = v.dim;
  const bool counted = job.counted;
  std::uint32_t* ring[kAhead];
  std::uint32_t none = 0;
  char* next_sum = s.sums;
  std::uint32_t unique = 0;
  const auto enter = [&](std::uint32_t k) {
    const std::int32_t row = items.rows[item_at(items, k)];
    std::uint32_t* at = row < 0 ? &none : &row_version(v, static_cast<std::uint32_t>(row));
    __builtin_prefetch(at, 1, 2);
    ring[k % kAhead] = at;
  };
  for (std::uint32_t k = 0; k < kAhead && k < items.n; ++k) enter(k);
  for (std::uint32_t k = 0; k < items.n; ++k) {
    std::uint32_t* const version = ring[k % kAhead];
    if (k + kAhead < items.n) enter(k + kAhead);
    if (kInPlace && k + kGradsAhead < items.n) {  // an item of a row met before will read both
      const std::uint32_t ahead = item_at(items, k + kGradsAhead);
      const std::uint32_t met = *ring[(k + kGradsAhead) % kAhead];
      if (met < unique && s.rows[met] == items.rows[ahead]) {
        prefetch_row(s.grads[met], static_cast<std::size_t>(d) * sizeof(T));
        prefetch_row(direct_grad<T>(job, items, ahead), static_cast<std::size_t>(d) * sizeof(T));
      }
    }
    const std::uint32_t e = item_at(items, k);
    const std::int32_t row = items.rows[e];
    if (row < 0) continue;
    const std::int64_t occurrences = counted ? occurrences_of(job, items, e) : 1;
    const std::uint32_t u = *version;
    if (u < unique && s.rows[u] == row) {
      T* acc = static_cast<T*>(const_cast<void*>(s.grads[u]));
      if constexpr (kInPlace) {
        const T* const sum = acc;
        const T* const g = direct_grad<T>(job, items, e);
        if (reinterpret_cast<char*>(acc) < s.sums || reinterpret_cast<char*>(acc) >= next_sum) {
          s.grads[u] = acc = reinterpret_cast<T*>(next_sum);
          next_sum += s.sum_stride;
        }
#pragma GCC ivdep
        for (int i = 0; i < d; ++i) acc[i] = sum[i] + g[i];
      } else {
        add_item(job, items, e, acc);
      }
      s.counts[u] += occurrences;
      continue;
    }
    s.rows[unique] = row;
    s.versions[unique] = u;
    s.heads[unique] = e;
    s.counts[unique] = occurrences;
    if constexpr (kInPlace) {
      s.grads[unique] = direct_grad<T>(job, items, e);
    } else {
      T* acc = reinterpret_cast<T*>(next_sum);
      next_sum += s.sum_stride;
      for (int i = 0; i < d; ++i) acc[i] = 0;
      add_item(job, items, e, acc);
      s.grads[unique] = acc;
    }
    *version = unique++;
  }
  return unique;
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

// A row under way: where its parts lie.
struct RowPlace {
  char* weights;
  char* state;
  std::uint32_t* version;
  LastSeen* seen;
};

__attribute__((always_inline)) inline RowPlace place_row(const RowView& v, std::int32_t number,
                                                         std::size_t weight_bytes,
                                                         std::size_t state_bytes) {
  const auto row = static_cast<std::uint32_t>(number);
  const BlockView& block = block_view(v, row);
  const RowPlace place{block.weights + std::size_t{row} * v.weight_stride,
                       block.state + std::size_t{row} * v.state_stride,
                       reinterpret_cast<std::uint32_t*>(block.versions + std::size_t{row} * 4),
                       reinterpret_cast<LastSeen*>(block.seen + std::size_t{row} * 8)};
  prefetch_write(place.weights, weight_bytes);
  prefetch_write(place.state, state_bytes);
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

// Runs body(u, place) for every row of the list, rows on their way kAhead before.
template <class T, class Body>
__attribute__((always_inline)) inline void each_row(const ApplyJob& job, const ApplyScratch s,
                                                    std::uint32_t unique, const Body& body) {
  const RowView v = job.table.rows;
  const std::size_t weight_bytes = row_size(v);
  const std::size_t state_bytes = static_cast<std::size_t>(v.state_width) * sizeof(T);
  const std::size_t grad_bytes = static_cast<std::size_t>(v.dim) * sizeof(T);
  RowPlace ring[kAhead];
  for (std::uint32_t u = 0; u < kAhead && u < unique; ++u) {
    ring[u] = place_row(v, s.rows[u], weight_bytes, state_bytes);
  }
  for (std::uint32_t u = 0; u < unique; ++u) {
    const RowPlace place = ring[u % kAhead];
    if (u + kAhead < unique) {
      ring[u % kAhead] = place_row(v, s.rows[u + kAhead], weight_bytes, state_bytes);
    }
    if (u + kGradsAhead < unique) {
      prefetch_row(static_cast<const char*>(s.grads[u + kGradsAhead]), grad_bytes);
    }
    body(u, place);
  }
}

// One segment of fp32 or fp64 columns, gradients as they are: what most tables are.
template <class T, StepFunction<T> kStep>
void step_plain_rows(const ApplyJob& job, const ApplyScratch s, std::uint32_t unique) {
  const RuleConstants<T> constants(job.table.segments[0].rule);
  const StepParams step = job.step;
  const T lr = static_cast<T>(job.lrs[0]);
  const int d = job.table.rows.dim;
  each_row<T>(job, s, unique, [&](std::uint32_t u, const RowPlace& place) {
    kStep(RuleStep<T>{constants.params, reinterpret_cast<T*>(place.weights),
                      reinterpret_cast<T*>(place.state), static_cast<const T*>(s.grads[u]), d, lr,
                      step.global_step});
    stamp(step, place, s.counts[u]);
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
                           std::uint32_t unique) {
  const int d = job.table.rows.dim;
  std::int64_t skipped = 0;
  each_row<T>(job, s, unique, [&](std::uint32_t u, const RowPlace& place) {
    // Never the caller's: only a job whose rules just read gradients reads them in place.
    T* g = static_cast<T*>(const_cast<void*>(s.grads[u]));
    if (job.step.nan_policy != 0 && !accept(job.step, g, d)) {
      *place.version = s.versions[u];
      ++skipped;
      return;
    }
    if (job.keeper.keep != nullptr && job.step.nan_policy != 0) {
      job.keeper.keep(job.keeper.context, job.table.rows, s.rows + u, s.versions + u, 1);
    }
    const Source& source = source_at(job, items, s.heads[u]);
    const T* seen = source.seen == nullptr
                        ? nullptr
                        : static_cast<const T*>(source.seen) +
                              static_cast<std::int64_t>(s.heads[u] - source.item_start) * d;
    step_any_row(job, static_cast<std::uint32_t>(s.rows[u]), place, g,
                 reinterpret_cast<T*>(s.temp), seen);
    stamp(job.step, place, s.counts[u]);
  });
  return skipped;
}

template <class T>
std::int64_t apply_typed(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  const std::uint32_t unique =
      job.in_place ? group_rows<T, true>(job, items, s) : group_rows<T, false>(job, items, s);
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
  const bool compensated = job.table.segments[0].rule.delay_compensated;
  if (!job.table.plain || job.table.n_segments != 1 || compensated || job.step.nan_policy != 0) {
    return step_any_rows<T>(job, items, s, unique);
  }
  with_rule<T>(job.table.segments[0].rule.kind,
               [&](auto rule) { step_plain_rows<T, rule.value>(job, s, unique); });
  return 0;
}

template <class T>
std::uint32_t sum_typed(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  const std::uint32_t unique = group_rows<T, false>(job, items, s);
  for (std::uint32_t u = 0; u < unique; ++u) {
    row_version(job.table.rows, static_cast<std::uint32_t>(s.rows[u])) = s.versions[u];
  }
  return unique;
}

}  // namespace
}  // namespace shoal
