// Shard: from recorded gradients to stepped rows.
//
// A table's items (positions of the records) are partitioned by row, stably, so that each part is
// summed and stepped by one thread in input order: the result does not depend on the thread count.
// One thread takes all of a table as one part, as it came.
#include <algorithm>
#include <cstring>

#include "apply_items.h"
#include "shard.h"

namespace shoal {
namespace {

struct GradRange {
  const void* data;
  std::int64_t n;
  bool wide;
};

}  // namespace

bool gradients_finite(const Shard& shard, const std::vector<GradArgs>& records, int threads) {
  constexpr std::int64_t kRange = 1 << 18;
  std::vector<GradRange> ranges;
  const auto add = [&](const void* data, std::int64_t n, bool wide) {
    for (std::int64_t at = 0; at < n; at += kRange) {
      ranges.push_back(GradRange{static_cast<const char*>(data) + at * (wide ? 8 : 4),
                                 std::min(kRange, n - at), wide});
    }
  };
  for (const GradArgs& record : records) {
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
      for (int k = 0; k < pool.n_slices; ++k) wide[pool.slices[k].output] = doubles;
    }
    for (std::size_t k = 0; k < outputs; ++k) {
      add(record.grads[k], record.bags * record.plan->widths[k], wide[k]);
    }
  }
  std::atomic<bool> good{true};
  Pool::instance().run(static_cast<std::int64_t>(ranges.size()), threads,
                       [&](std::int64_t i, int) {
                         const GradRange& r = ranges[i];
                         const bool fine =
                             r.wide ? kernels().finite64(static_cast<const double*>(r.data), r.n)
                                    : kernels().finite32(static_cast<const float*>(r.data), r.n);
                         if (!fine) good.store(false, std::memory_order_relaxed);
                       });
  return good.load();
}

void Shard::apply(const ApplyArgs& args) {
  if (args.step.nan_policy == 0 && !gradients_finite(*this, args.records, args.threads)) {
    throw NonFiniteError{};
  }
  const WriteGuard guard(lock_);
  apply_locked(args);
}

void Shard::apply_locked(const ApplyArgs& args) {
  for (const GradArgs& record : args.records) {
    if (!record.ticket->live) throw TicketStateError();
  }
  WholeRows whole;
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
  step.epoch = epoch_;
  last_step_ = args.step.global_step;
  for (const GradArgs& record : args.records) {
    step.event_time_s = std::max(step.event_time_s, record.ticket->event_time_s);
  }
  const std::vector<Part> parts = parts_of(works);
  if (parts.empty()) return;
  scratch_.resize(std::max(scratch_.size(), static_cast<std::size_t>(std::max(args.threads, 1))));
  // All memory first: a refusal must come before the first row changes.
  for (PartScratch& scratch : scratch_) {
    for (const Part& part : parts) {
      const TableWork& work = works[part.work];
      scratch.fit(part.n, tables_[work.table].view().rows, in_place(work));
    }
  }
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

std::vector<Sums> Shard::sum(const std::vector<GradArgs>& records) {
  const WriteGuard guard(lock_);  // grouping borrows the versions of rows
  for (const GradArgs& record : records) {
    if (!record.ticket->live) throw TicketStateError();
  }
  WholeRows whole;
  std::vector<TableWork> works = work_of(*this, records, whole);
  std::size_t total = 0;
  for (const TableWork& work : works) total += static_cast<std::size_t>(work.n);
  lists_.reserve(total);
  if (scratch_.empty()) scratch_.resize(1);
  std::vector<Sums> result;
  for (TableWork& work : works) {
    list_items(work, lists_);
    const RowView rows = tables_[work.table].view().rows;
    const ApplyJob job{tables_[work.table].view(), work.sources.data(), nullptr, StepParams{},
                       work.counted, false, Keeper{}};
    const ApplyScratch memory = scratch_[0].fit(work.items.n, rows, false);
    const std::uint32_t unique = kernels().sum(job, work.items, memory);
    const std::size_t bytes = rows.dim * (rows.dtype == DType::f64 ? 8 : 4);
    Sums sums{work.table, std::vector<std::int64_t>(unique), std::vector<std::int64_t>(unique),
              std::vector<char>(unique * bytes)};
    for (std::uint32_t u = 0; u < unique; ++u) {
      sums.ids[u] = row_id(rows, static_cast<std::uint32_t>(memory.rows[u]));
      sums.counts[u] = memory.counts[u];
      std::memcpy(sums.sums.data() + u * bytes, memory.grads[u], bytes);
    }
    result.push_back(std::move(sums));
  }
  return result;
}

void Shard::apply_ids(const Groups& groups, const std::int64_t* counts, ApplyArgs args) {
  GradArgs& record = args.records[0];
  if (args.step.nan_policy == 0) {
    Ticket shape;  // what the finite check needs to know of the ids
    shape.rows.resize(static_cast<std::size_t>(groups.n));
    shape.splits.assign(groups.splits, groups.splits + groups.count + 1);
    shape.tables.assign(groups.tables, groups.tables + groups.count);
    record.ticket = &shape;
    if (!gradients_finite(*this, args.records, args.threads)) throw NonFiniteError{};
  }
  const Pinned ticket(*this, find_or_init(groups, counts, false, args.step, args.threads));
  record.ticket = ticket.get();
  const WriteGuard guard(lock_);
  apply_locked(args);
}

}  // namespace shoal
