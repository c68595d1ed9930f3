// Shard: from recorded gradients to stepped rows.
//
// A table's items (positions of the records) are partitioned by row, stably, so that each part is
// summed and stepped by one thread in input order: the result does not depend on the thread count.
// One thread takes all of a table as one part, as it came.
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "shard.h"

namespace shoal {
namespace {

constexpr std::int64_t kSummedItems = 4096;   // of a part whose every row is summed in scratch
constexpr std::int64_t kSharedItems = 2048;   // of a part worth another thread
constexpr std::int64_t kChunkItems = 16384;
constexpr int kMaxPartitionBits = 6;
constexpr int kPartsPerThread = 8;
// Rows that share a cache line of versions stay with one thread.
constexpr int kLineShift = 4;

struct TableWork {
  int table = 0;
  std::vector<Source> sources;
  std::int64_t n = 0;
  int bits = 0;
  Items items{};                      // of all parts: order is null
  const std::uint32_t* order = nullptr;
  std::vector<std::size_t> starts;    // of each part, in items; one part: empty
  std::size_t first_lr = 0;
  bool counted = false;
  bool direct = true;                 // all sources are
};

// Slices of unpooled sources; a deque-like store whose addresses stay.
struct WholeRows {
  std::vector<std::unique_ptr<Slice>> slices;
  std::vector<std::unique_ptr<std::int64_t>> widths;
};

Source source_of(const Shard& shard, const GradArgs& record, int g, WholeRows& whole) {
  const Ticket& ticket = *record.ticket;
  Source s{};
  s.first = ticket.splits[g];
  s.stop = ticket.splits[g + 1];
  s.rows = ticket.rows.data();
  s.weights = record.weights;
  s.scale = record.scale;
  s.counts = ticket.counts.empty() ? nullptr : ticket.counts.data();
  const int d = shard.table(ticket.tables[g]).spec().dim;
  if (record.plan == nullptr) {
    whole.slices.push_back(std::make_unique<Slice>(Slice{0, d, 0, 0, false}));
    whole.widths.push_back(std::make_unique<std::int64_t>(d));
    s.bags = s.stop - s.first;
    s.pool = PoolSpec{Pooling::sum, 1, whole.slices.back().get(), 1};
    s.grads = record.grads + g;
    s.widths = whole.widths.back().get();
    s.seen = record.seen == nullptr ? nullptr : record.seen[g];
  } else {
    s.offsets = record.offsets + g * record.bags;
    s.bags = record.bags;
    s.pool = record.plan->pools[g];
    s.grads = record.grads;
    s.widths = record.plan->widths.data();
  }
  const Slice& slice = s.pool.slices[0];
  if (s.pool.pooling == Pooling::sum && s.weights == nullptr && s.scale == 1.0 &&
      s.pool.n_slices == 1 && slice.start == 0 && slice.stop == d && s.seen == nullptr) {
    const auto real = static_cast<std::int64_t>(
        shard.table(ticket.tables[g]).spec().dtype == DType::f64 ? 8 : 4);
    s.direct = static_cast<const char*>(s.grads[slice.output]) + slice.column * real;
    s.direct_stride = s.widths[slice.output] * real;
  }
  return s;
}

std::vector<TableWork> work_of(const Shard& shard, const std::vector<GradArgs>& records,
                               WholeRows& whole) {
  std::vector<TableWork> all(static_cast<std::size_t>(shard.size()));
  std::unordered_set<const Ticket*> sighted;
  for (const GradArgs& record : records) {
    const bool first = sighted.insert(record.ticket).second;
    for (std::size_t g = 0; g < record.ticket->tables.size(); ++g) {
      TableWork& work = all[record.ticket->tables[g]];
      Source source = source_of(shard, record, static_cast<int>(g), whole);
      source.sighted = first;
      if (source.stop == source.first) continue;
      source.item_start = static_cast<std::uint32_t>(work.n);
      work.direct = work.direct && source.direct != nullptr;
      work.sources.push_back(source);
      work.n += source.stop - source.first;
      work.counted = work.counted || source.counts != nullptr || !first;
    }
  }
  std::size_t lr = 0;
  for (int t = 0; t < shard.size(); ++t) {
    all[t].table = t;
    all[t].first_lr = lr;
    lr += shard.table(t).spec().segments.size();
  }
  std::erase_if(all, [](const TableWork& work) { return work.n == 0; });
  return all;
}

bool one_bag_each(const Source& s) {
  if (s.offsets == nullptr) return true;
  if (s.bags != s.stop - s.first) return false;
  std::int64_t off = 0;
  for (std::int64_t bag = 0; bag < s.bags; ++bag) off |= s.offsets[bag] ^ (s.first + bag);
  return off == 0;
}

// Points at the ticket's rows where they serve as they are; writes rows, bags and sources of items
// into `lists` where not.
void list_items(TableWork& work, ItemLists& lists) {
  const bool one = work.sources.size() == 1;
  const Source& first = work.sources[0];
  work.items = Items{first.rows + first.first, nullptr, nullptr, nullptr,
                     static_cast<std::uint32_t>(work.n)};
  if (one && one_bag_each(first)) return;
  const auto n = static_cast<std::size_t>(work.n);
  std::uint32_t* bags = lists.bags.take(n);
  work.items.bags = bags;
  std::int32_t* rows = nullptr;
  std::uint32_t* numbers = nullptr;
  if (!one) {
    work.items.rows = rows = reinterpret_cast<std::int32_t*>(lists.rows.take(n));
    work.items.sources = numbers = lists.sources.take(n);
  }
  for (std::uint32_t k = 0; k < work.sources.size(); ++k) {
    const Source& s = work.sources[k];
    const std::size_t at = s.item_start;
    const auto many = static_cast<std::size_t>(s.stop - s.first);
    if (!one) {
      std::memcpy(rows + at, s.rows + s.first, many * sizeof(std::int32_t));
      std::fill_n(numbers + at, many, k);
    }
    if (s.offsets == nullptr) {
      for (std::size_t i = 0; i < many; ++i) bags[at + i] = static_cast<std::uint32_t>(i);
      continue;
    }
    for (std::int64_t bag = 0; bag < s.bags; ++bag) {
      for (std::int64_t i = s.offsets[bag]; i < s.offsets[bag + 1]; ++i) {
        bags[at + static_cast<std::size_t>(i - s.first)] = static_cast<std::uint32_t>(bag);
      }
    }
  }
}

int part_bits(const TableWork& work, int threads, bool in_place) {
  const std::int64_t per_thread = threads == 1 ? 1 : std::int64_t{threads} * kPartsPerThread;
  int bits = 0;
  while (bits < kMaxPartitionBits &&
         (((std::int64_t{1} << bits) < per_thread && (work.n >> bits) > kSharedItems) ||
          (!in_place && (work.n >> bits) > kSummedItems))) {
    ++bits;
  }
  return bits;
}

std::uint32_t part_of(std::int32_t row, std::uint32_t mask) {
  return (static_cast<std::uint32_t>(row) >> kLineShift) & mask;
}

struct Chunk {
  std::size_t work;
  std::uint32_t start, stop;  // items
};

std::vector<Chunk> chunks_of(const std::vector<TableWork>& works) {
  std::vector<Chunk> chunks;
  for (std::size_t w = 0; w < works.size(); ++w) {
    if (works[w].bits == 0) continue;
    const std::int64_t parts = std::max<std::int64_t>(1, works[w].n / kChunkItems);
    for (std::int64_t p = 0; p < parts; ++p) {
      chunks.push_back(Chunk{w, static_cast<std::uint32_t>(works[w].n * p / parts),
                             static_cast<std::uint32_t>(works[w].n * (p + 1) / parts)});
    }
  }
  return chunks;
}

// Turns counts per (chunk, part) of one table into where each chunk writes, part by part.
void place_parts(TableWork& work, std::size_t* counts, std::size_t chunks) {
  const std::size_t parts = std::size_t{1} << work.bits;
  work.starts.assign(parts + 1, 0);
  std::size_t total = 0;
  for (std::size_t p = 0; p < parts; ++p) {
    work.starts[p] = total;
    for (std::size_t c = 0; c < chunks; ++c) {
      std::size_t& count = counts[c * parts + p];
      const std::size_t here = count;
      count = total;
      total += here;
    }
  }
  work.starts[parts] = total;
}

// Orders the items of every table that has several parts, in input order within a part.
void partition_items(std::vector<TableWork>& works, ItemLists& lists, int threads) {
  const std::vector<Chunk> chunks = chunks_of(works);
  if (chunks.empty()) return;
  std::vector<std::size_t> histogram_at(chunks.size() + 1, 0);
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    histogram_at[c + 1] = histogram_at[c] + (std::size_t{1} << works[chunks[c].work].bits);
  }
  std::vector<std::size_t> histogram(histogram_at.back(), 0);
  std::vector<std::uint32_t*> orders(works.size(), nullptr);
  for (std::size_t w = 0; w < works.size(); ++w) {
    if (works[w].bits == 0) continue;
    works[w].order = orders[w] = lists.order.take(static_cast<std::size_t>(works[w].n));
  }
  const auto each = [&](const auto& body) {
    Pool::instance().run(static_cast<std::int64_t>(chunks.size()), threads,
                         [&](std::int64_t c, int) {
                           const Chunk& chunk = chunks[c];
                           const TableWork& work = works[chunk.work];
                           body(chunk, work.items.rows, (1U << work.bits) - 1,
                                histogram.data() + histogram_at[c]);
                         });
  };
  each([](const Chunk& chunk, const std::int32_t* rows, std::uint32_t mask, std::size_t* at) {
    for (std::uint32_t e = chunk.start; e < chunk.stop; ++e) {
      if (rows[e] >= 0) ++at[part_of(rows[e], mask)];
    }
  });
  for (std::size_t c = 0; c < chunks.size();) {
    std::size_t stop = c;
    while (stop < chunks.size() && chunks[stop].work == chunks[c].work) ++stop;
    place_parts(works[chunks[c].work], histogram.data() + histogram_at[c], stop - c);
    c = stop;
  }
  each([&](const Chunk& chunk, const std::int32_t* rows, std::uint32_t mask, std::size_t* at) {
    std::uint32_t* order = orders[chunk.work];
    for (std::uint32_t e = chunk.start; e < chunk.stop; ++e) {
      if (rows[e] >= 0) order[at[part_of(rows[e], mask)]++] = e;
    }
  });
}

struct Part {
  std::size_t work;
  std::size_t start;
  std::uint32_t n;
};

// Largest first: the last to start should be small.
std::vector<Part> parts_of(const std::vector<TableWork>& works) {
  std::vector<Part> parts;
  for (std::size_t w = 0; w < works.size(); ++w) {
    if (works[w].bits == 0) parts.push_back(Part{w, 0, static_cast<std::uint32_t>(works[w].n)});
    for (std::size_t p = 0; p + 1 < works[w].starts.size(); ++p) {
      const std::size_t start = works[w].starts[p];
      const auto n = static_cast<std::uint32_t>(works[w].starts[p + 1] - start);
      if (n > 0) parts.push_back(Part{w, start, n});
    }
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& a, const Part& b) { return a.n > b.n; });
  return parts;
}

Items items_of(const TableWork& work, const Part& part) {
  Items items = work.items;
  items.order = work.order == nullptr ? nullptr : work.order + part.start;
  items.n = part.n;
  return items;
}

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
                           args.lrs.data() + work.first_lr, step, work.counted, in_place(work)};
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
                       work.counted, false};
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
