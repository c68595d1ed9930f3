// Shard: from recorded gradients to stepped rows.
//
// A table's items (positions of the records) are partitioned by row, stably, so that each part is
// summed and stepped by one thread in input order: the result does not depend on the thread count.
// One thread takes all of a table as one part, as it came.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "apply_items.h"
#include "shard.h"

namespace shoal {
namespace {

struct GradRange {
  const void* data;
  std::int64_t n;
  bool wide;
  std::size_t record;
};

std::vector<GradRange> ranges_of(const Shard& shard, const std::vector<GradArgs*>& records) {
  constexpr std::int64_t kRange = 1 << 18;
  std::vector<GradRange> ranges;
  std::size_t number = 0;
  const auto add = [&](const void* data, std::int64_t n, bool wide) {
    for (std::int64_t at = 0; at < n; at += kRange) {
      ranges.push_back(GradRange{static_cast<const char*>(data) + at * (wide ? 8 : 4),
                                 std::min(kRange, n - at), wide, number});
    }
  };
  for (; number < records.size(); ++number) {
    const GradArgs& record = *records[number];
    const Ticket& ticket = *record.ticket;
    const std::size_t outputs = record.plan == nullptr ? 0 : record.plan->widths.size();
    std::vector<bool> wide(outputs, false);
    for (std::size_t g = 0; g < ticket.tables.size(); ++g) {
      const TableSpec& spec = shard.table(ticket.tables[g]).spec();
      const bool doubles = spec.dtype == DType::f64;
      if (record.plan == nullptr) {
        add(record.grads[g], (ticket.splits[g + 1] - ticket.splits[g]) * spec.dim, doubles);
        continue;
      }
      const PoolSpec& pool = record.plan->pools[g];
      for (std::int64_t k = 0; k < pool.n_slices; ++k) wide[pool.slices[k].output] = doubles;
    }
    for (std::size_t k = 0; k < outputs; ++k) {
      add(record.grads[k], record.bags * record.plan->widths[k], wide[k]);
    }
  }
  return ranges;
}

// True when no row's sum can be infinite or NaN, whichever rows the ids have: even all gradients
// together, each as large as the largest, are far from the largest number. What is not sure has
// to be summed to know. Throws for a gradient that is not finite, whether a row would take it or not.
bool sums_surely_finite(const Shard& shard, const std::vector<GradArgs*>& records, int threads) {
  const std::vector<GradRange> ranges = ranges_of(shard, records);
  std::vector<double> found(ranges.size());
  Pool::instance().run(static_cast<std::int64_t>(ranges.size()), threads,
                       [&](std::int64_t i, int) {
                         found[i] = kernels().largest(ranges[i].data, ranges[i].n, ranges[i].wide);
                       });
  std::vector<double> most(records.size(), 1.0);  // a factor may overflow where gradients are 0
  bool wide = true;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (found[i] == HUGE_VAL) throw NonFiniteError{};
    most[ranges[i].record] = std::max(most[ranges[i].record], found[i]);
    wide = wide && ranges[i].wide;
  }
  double total = 0;
  for (std::size_t r = 0; r < records.size(); ++r) {
    const GradArgs& record = *records[r];
    const auto n = static_cast<std::int64_t>(record.ticket->rows.size());
    std::int64_t slices = 1;  // that read one column
    for (std::size_t g = 0; record.plan != nullptr && g < record.plan->pools.size(); ++g) {
      slices = std::max(slices, record.plan->pools[g].n_slices);
    }
    double factor = std::fabs(record.scale);
    if (record.weights != nullptr) {
      factor *= std::max(1.0, kernels().largest(record.weights, n, false));
    }
    total += most[r] * factor * static_cast<double>(n) * static_cast<double>(slices);
  }
  // A quarter: rounding may add to a sum as it grows.
  return total <= (wide ? std::numeric_limits<double>::max()
                        : static_cast<double>(std::numeric_limits<float>::max())) / 4;
}

// Adds up the gradients of each id of a table in order of position, as a step would.
template <class T>
bool id_sums_finite(const Groups& groups, const std::vector<void*>& grads, int table, int dim) {
  std::unordered_map<std::int64_t, std::size_t> places;
  std::vector<T> sums;
  for (int g = 0; g < groups.count; ++g) {
    if (groups.tables[g] != table) continue;
    const T* grad = static_cast<const T*>(grads[g]);
    for (std::int64_t i = groups.splits[g]; i < groups.splits[g + 1]; ++i, grad += dim) {
      const std::size_t place = places.try_emplace(groups.ids[i], sums.size()).first->second;
      if (place == sums.size()) sums.resize(place + static_cast<std::size_t>(dim), T(0));
      for (int k = 0; k < dim; ++k) sums[place + static_cast<std::size_t>(k)] += grad[k];
    }
  }
  const auto n = static_cast<std::int64_t>(sums.size());
  return kernels().largest(sums.data(), n, sizeof(T) == 8) != HUGE_VAL;
}

void check_live(const std::vector<GradArgs*>& records) {
  for (const GradArgs* record : records) {
    if (!record->ticket->live) throw TicketStateError();
  }
}

ApplyJob sum_job(const TableView& view, const TableWork& work) {
  return {view, work.sources.data(), nullptr, StepParams{}, work.counted, false, Keeper{}};
}

}  // namespace

void Shard::apply(const ApplyArgs& args) {
  const bool unsure =
      args.step.nan_policy == 0 && !sums_surely_finite(*this, args.records, args.threads);
  const WriteGuard guard(lock_);
  apply_locked(args, unsure);
}

void Shard::apply_locked(const ApplyArgs& args, bool unsure) {
  check_live(args.records);
  std::deque<PlanSlice> whole;
  std::vector<TableWork> works = work_of(*this, args.records, whole);
  const auto in_place = [&](const TableWork& work) {
    return work.direct && args.step.nan_policy == 0 && tables_[work.table].view().plain;
  };
  std::size_t total = 0;
  for (const TableWork& work : works) total += static_cast<std::size_t>(work.n);
  lists_.reserve(total);
  for (TableWork& work : works) {
    list_items(work, lists_);
    work.bits = part_bits(work, args.threads, in_place(work));
  }
  partition_items(works, lists_, args.threads);
  StepParams step = args.step;
  step.version = version_;
  for (const GradArgs* record : args.records) {
    step.event_time_s = std::max(step.event_time_s, record->ticket->event_time_s);
  }
  const std::vector<Part> parts = parts_of(works);
  if (parts.empty()) {
    last_step_ = args.step.global_step;
    return;
  }
  scratch_.resize(std::max(scratch_.size(), static_cast<std::size_t>(std::max(args.threads, 1))));
  // All memory first: a refusal must come before the first row changes.
  for (PartScratch& scratch : scratch_) {
    for (const Part& part : parts) {
      const TableWork& work = works[part.work];
      scratch.fit(part.n, tables_[work.table].view().rows, in_place(work) && !unsure);
    }
  }
  if (unsure && !sums_finite(works, parts, args.threads)) throw NonFiniteError{};
  last_step_ = args.step.global_step;
  std::vector<std::atomic<std::int64_t>> skipped(works.size());
  Pool::instance().run(
      static_cast<std::int64_t>(parts.size()), args.threads, [&](std::int64_t i, int lane) {
        const TableWork& work = works[parts[i].work];
        const ApplyJob job{tables_[work.table].view(), work.sources.data(),
                           args.lrs.data() + work.first_lr, step, work.counted, in_place(work),
                           tables_[work.table].keeper()};
        const ApplyScratch memory =
            scratch_[lane].fit(parts[i].n, job.table.rows, job.in_place);
        skipped[parts[i].work] += kernels().apply(job, items_of(work, parts[i]), memory);
      });
  for (std::size_t w = 0; w < works.size(); ++w) {
    tables_[works[w].table].counters().nonfinite += skipped[w].load();
  }
}

bool Shard::sums_finite(const std::vector<TableWork>& works, const std::vector<Part>& parts,
                        int threads) {
  std::atomic<bool> good{true};
  Pool::instance().run(
      static_cast<std::int64_t>(parts.size()), threads, [&](std::int64_t i, int lane) {
        const TableWork& work = works[parts[i].work];
        const TableView view = tables_[work.table].view();
        const ApplyJob job = sum_job(view, work);
        const ApplyScratch memory = scratch_[lane].fit(parts[i].n, view.rows, false);
        const std::uint32_t unique = kernels().sum(job, items_of(work, parts[i]), memory);
        const bool wide = view.rows.dtype == DType::f64;
        for (std::uint32_t u = 0; u < unique; ++u) {
          const char* sum = memory.sums + u * memory.sum_stride;
          if (kernels().largest(sum, view.rows.dim, wide) == HUGE_VAL) good = false;
        }
      });
  return good;
}

std::vector<Sums> Shard::sum(const std::vector<GradArgs*>& records) {
  const WriteGuard guard(lock_);  // grouping borrows the versions of rows
  check_live(records);
  std::deque<PlanSlice> whole;
  std::vector<TableWork> works = work_of(*this, records, whole);
  std::size_t total = 0;
  for (const TableWork& work : works) total += static_cast<std::size_t>(work.n);
  lists_.reserve(total);
  if (scratch_.empty()) scratch_.resize(1);
  std::vector<Sums> result;
  for (TableWork& work : works) {
    list_items(work, lists_);
    const RowView rows = tables_[work.table].view().rows;
    const ApplyJob job = sum_job(tables_[work.table].view(), work);
    const ApplyScratch memory = scratch_[0].fit(work.items.n, rows, false);
    const std::uint32_t unique = kernels().sum(job, work.items, memory);
    const std::size_t bytes = rows.dim * real_bytes(rows.dtype);
    Sums sums{work.table, std::vector<std::int64_t>(unique), std::vector<std::int64_t>(unique),
              std::vector<char>(unique * bytes)};
    for (std::uint32_t u = 0; u < unique; ++u) {
      sums.ids[u] = row_id(rows, static_cast<std::uint32_t>(memory.rows[u]));
      sums.counts[u] = memory.counts[u];
      std::memcpy(sums.sums.data() + u * bytes, memory.sums + u * memory.sum_stride, bytes);
    }
    result.push_back(std::move(sums));
  }
  return result;
}

void Shard::apply_ids(const Groups& groups, const std::int64_t* counts, ApplyArgs args) {
  GradArgs& record = *args.records[0];
  if (args.step.nan_policy == 0) {
    Ticket shape;  // what the check needs to know of the ids
    shape.rows.resize(static_cast<std::size_t>(groups.n));
    shape.splits.assign(groups.splits, groups.splits + groups.count + 1);
    shape.tables.assign(groups.tables, groups.tables + groups.count);
    record.ticket = &shape;
    const bool sure = sums_surely_finite(*this, args.records, args.threads);
    for (int t = 0; !sure && t < size(); ++t) {
      const TableSpec& spec = tables_[t].spec();
      // Before ids are inserted, so by id: a refusal leaves no new rows.
      const bool good = spec.dtype == DType::f64
                            ? id_sums_finite<double>(groups, record.grads, t, spec.dim)
                            : id_sums_finite<float>(groups, record.grads, t, spec.dim);
      if (!good) throw NonFiniteError{};
    }
  }
  const std::unique_ptr<Ticket> ticket =
      find_or_init(groups, counts, false, args.step, args.threads);
  record.ticket = ticket.get();
  const WriteGuard guard(lock_);
  apply_locked(args, false);
}

}  // namespace shoal
