// Shard: from recorded gradients to stepped rows.
//
// Items (row, where its gradient is) are partitioned by row, stably, so that each partition is
// summed and stepped by one thread in input order: the result does not depend on the thread count.
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "shard.h"

namespace shoal {
namespace {

constexpr std::int64_t kPartitionItems = 4096;
constexpr std::int64_t kChunkItems = 16384;
constexpr int kMaxPartitionBits = 6;

struct TableWork {
  int table = 0;
  std::vector<Source> sources;
  std::int64_t n = 0;
  int bits = 0;
  std::size_t first_item = 0;
  std::vector<std::size_t> starts;  // of each partition, in items
  std::size_t first_lr = 0;
  bool counted = false;
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
  s.direct = s.pool.pooling == Pooling::sum && s.weights == nullptr && s.scale == 1.0 &&
             s.pool.n_slices == 1 && s.pool.slices[0].start == 0 && s.pool.slices[0].stop == d &&
             s.seen == nullptr;
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

struct Chunk {
  std::size_t work;
  std::uint32_t source;
  std::int64_t bag_start, bag_stop;
};

std::int64_t bag_begin(const Source& s, std::int64_t bag) {
  return s.offsets == nullptr ? s.first + bag : s.offsets[bag];
}

template <class Visit>
void each_item(const Source& s, std::uint32_t number, std::int64_t bag_start,
               std::int64_t bag_stop, const Visit& visit) {
  std::int64_t position = bag_begin(s, bag_start);
  for (std::int64_t bag = bag_start; bag < bag_stop; ++bag) {
    const std::int64_t stop = bag_begin(s, bag + 1);
    for (; position < stop; ++position) {
      const std::int32_t row = s.rows[position];
      if (row < 0) continue;
      visit(Item{row, number, static_cast<std::uint32_t>(bag),
                 static_cast<std::uint32_t>(position - s.first)});
    }
  }
}

std::vector<Chunk> chunks_of(const std::vector<TableWork>& works) {
  std::vector<Chunk> chunks;
  for (std::size_t w = 0; w < works.size(); ++w) {
    for (std::uint32_t s = 0; s < works[w].sources.size(); ++s) {
      const Source& source = works[w].sources[s];
      const std::int64_t n = source.stop - source.first;
      const std::int64_t parts = std::max<std::int64_t>(1, n / kChunkItems);
      for (std::int64_t p = 0; p < parts; ++p) {
        chunks.push_back(
            Chunk{w, s, source.bags * p / parts, source.bags * (p + 1) / parts});
      }
    }
  }
  return chunks;
}

// Fills `items` table by table, partition by partition, in input order within a partition.
void partition_items(std::vector<TableWork>& works, std::vector<Item>& items, int threads,
                     bool single) {
  const std::vector<Chunk> chunks = chunks_of(works);
  std::vector<std::size_t> histogram_at(chunks.size() + 1, 0);
  for (TableWork& work : works) {
    work.bits = 0;
    while (!single && work.bits < kMaxPartitionBits && (work.n >> work.bits) > kPartitionItems) {
      ++work.bits;
    }
  }
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    histogram_at[c + 1] = histogram_at[c] + (std::size_t{1} << works[chunks[c].work].bits);
  }
  std::vector<std::size_t> histogram(histogram_at.back(), 0);
  const auto batches = static_cast<std::int64_t>(chunks.size());
  Pool::instance().run(batches, threads, [&](std::int64_t c, int) {
    const Chunk& chunk = chunks[c];
    const TableWork& work = works[chunk.work];
    std::size_t* counts = histogram.data() + histogram_at[c];
    const std::uint32_t mask = (1U << work.bits) - 1;
    each_item(work.sources[chunk.source], chunk.source, chunk.bag_start, chunk.bag_stop,
              [&](const Item& item) { ++counts[static_cast<std::uint32_t>(item.row) & mask]; });
  });
  std::size_t total = 0;
  std::size_t c = 0;
  for (std::size_t w = 0; w < works.size(); ++w) {
    const std::size_t parts = std::size_t{1} << works[w].bits;
    std::size_t stop = c;
    while (stop < chunks.size() && chunks[stop].work == w) ++stop;
    works[w].starts.assign(parts + 1, 0);
    for (std::size_t p = 0; p < parts; ++p) {
      works[w].starts[p] = total;
      for (std::size_t i = c; i < stop; ++i) {
        std::size_t& count = histogram[histogram_at[i] + p];
        const std::size_t here = count;
        count = total;
        total += here;
      }
    }
    works[w].starts[parts] = total;
    c = stop;
  }
  if (items.size() < total) items.resize(total);
  Pool::instance().run(batches, threads, [&](std::int64_t i, int) {
    const Chunk& chunk = chunks[i];
    const TableWork& work = works[chunk.work];
    std::size_t* at = histogram.data() + histogram_at[i];
    const std::uint32_t mask = (1U << work.bits) - 1;
    each_item(work.sources[chunk.source], chunk.source, chunk.bag_start, chunk.bag_stop,
              [&](const Item& item) {
                items[at[static_cast<std::uint32_t>(item.row) & mask]++] = item;
              });
  });
}

// One thread's working memory; grows to the largest partition it meets.
class Scratch {
 public:
  ApplyScratch fit(std::uint32_t m, int dim) {
    std::uint32_t slots = 16;
    while (slots < 2 * m) slots *= 2;
    if (slots_.size() < 2 * std::size_t{slots}) slots_.resize(2 * std::size_t{slots});
    if (links_.size() < 4 * std::size_t{m}) links_.resize(4 * std::size_t{m});
    if (buffer_.size() < 3 * (std::size_t(dim) + 16)) buffer_.resize(3 * (std::size_t(dim) + 16));
    return ApplyScratch{slots_.data(), slots - 1, links_.data(), links_.data() + m,
                        links_.data() + 2 * std::size_t{m}, links_.data() + 3 * std::size_t{m},
                        buffer_.data()};
  }

 private:
  std::vector<std::int32_t> slots_;
  std::vector<std::uint32_t> links_;
  std::vector<double> buffer_;
};

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
  partition_items(works, items_, args.threads, false);
  StepParams step = args.step;
  step.epoch = epoch_;
  last_step_ = args.step.global_step;
  for (const GradArgs& record : args.records) {
    step.event_time_s = std::max(step.event_time_s, record.ticket->event_time_s);
  }
  struct Part {
    std::size_t work, part;
  };
  std::vector<Part> parts;
  for (std::size_t w = 0; w < works.size(); ++w) {
    for (std::size_t p = 0; p + 1 < works[w].starts.size(); ++p) parts.push_back(Part{w, p});
  }
  std::vector<Scratch> scratch(static_cast<std::size_t>(std::max(args.threads, 1)));
  std::vector<std::atomic<std::int64_t>> skipped(works.size());
  Pool::instance().run(
      static_cast<std::int64_t>(parts.size()), args.threads, [&](std::int64_t i, int lane) {
        const TableWork& work = works[parts[i].work];
        const std::size_t start = work.starts[parts[i].part];
        const auto m = static_cast<std::uint32_t>(work.starts[parts[i].part + 1] - start);
        const ApplyJob job{tables_[work.table].view(), work.sources.data(),
                           args.lrs.data() + work.first_lr, step, work.counted};
        ApplyScratch memory = scratch[lane].fit(m, job.table.rows.dim);
        skipped[parts[i].work] += kernels().apply(job, items_.data() + start, m, memory);
      });
  for (std::size_t w = 0; w < works.size(); ++w) {
    tables_[works[w].table].counters().nonfinite += skipped[w].load();
  }
}

std::vector<Sums> Shard::sum(const std::vector<GradArgs>& records) {
  const ReadGuard guard(lock_);
  for (const GradArgs& record : records) {
    if (!record.ticket->live) throw TicketStateError();
  }
  WholeRows whole;
  std::vector<TableWork> works = work_of(*this, records, whole);
  std::vector<Item> items;
  partition_items(works, items, 1, true);
  std::vector<Sums> result;
  Scratch scratch;
  for (const TableWork& work : works) {
    const Table& table = tables_[work.table];
    const auto m = static_cast<std::uint32_t>(work.starts[1] - work.starts[0]);
    const ApplyJob job{table.view(), work.sources.data(), nullptr, StepParams{}, work.counted};
    ApplyScratch memory = scratch.fit(m, job.table.rows.dim);
    const Item* first = items.data() + work.starts[0];
    const std::uint32_t unique = kernels().sum(job, first, m, memory, nullptr);
    Sums sums{work.table, std::vector<std::int64_t>(unique), std::vector<std::int64_t>(unique), {}};
    std::vector<std::int32_t> rows(unique);
    const std::size_t real = table.spec().dtype == DType::f64 ? 8 : 4;
    sums.sums.resize(std::size_t{unique} * job.table.rows.dim * real);
    SumOut out{unique, rows.data(), sums.sums.data(), sums.counts.data()};
    kernels().sum(job, first, m, memory, &out);
    for (std::uint32_t u = 0; u < unique; ++u) {
      sums.ids[u] = row_id(job.table.rows, static_cast<std::uint32_t>(rows[u]));
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
