#include "apply_items.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kSummedItems = 4096;   // of a part whose every row is summed in scratch
constexpr std::int64_t kSharedItems = 2048;   // of a part worth another thread
constexpr std::int64_t kChunkItems = 16384;
constexpr int kMaxPartitionBits = 6;
constexpr int kPartsPerThread = 8;
// Rows that share a cache line of versions stay with one thread.
constexpr int kLineShift = 4;

Source source_of(const Shard& shard, const GradArgs& record, int g, std::deque<PlanSlice>& whole) {
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
    s.bags = s.stop - s.first;
    s.pool = PoolSpec{kSum, 0, &whole.emplace_back(whole_row(d)), 1};
    s.grads = record.grads.data() + g;
    s.seen = record.seen.empty() ? nullptr : record.seen[g];
  } else {
    s.offsets = record.offsets + g * record.bags;
    s.bags = record.bags;
    s.pool = record.plan->pools[g];
    s.grads = record.grads.data();
  }
  const PlanSlice& slice = s.pool.slices[0];
  if ((s.pool.pooling & ~kByRow) == kSum && s.weights == nullptr && s.scale == 1.0 &&
      s.pool.n_slices == 1 && slice.width == d && s.seen == nullptr) {
    const auto real =
        static_cast<std::int64_t>(real_bytes(shard.table(ticket.tables[g]).spec().dtype));
    s.direct = static_cast<const char*>(s.grads[slice.output]) + slice.place * real;
    s.direct_stride = slice.stride * real;
  }
  return s;
}

bool one_bag_each(const Source& s) {
  if (s.offsets == nullptr) return true;
  if (s.bags != s.stop - s.first) return false;
  std::int64_t off = 0;
  for (std::int64_t bag = 0; bag < s.bags; ++bag) off |= s.offsets[bag] ^ (s.first + bag);
  return off == 0;
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

}  // namespace

std::vector<TableWork> work_of(const Shard& shard, const std::vector<GradArgs*>& records,
                               std::deque<PlanSlice>& whole) {
  std::vector<TableWork> all(static_cast<std::size_t>(shard.size()));
  std::unordered_set<const Ticket*> counted_once;
  for (const GradArgs* record : records) {
    const Ticket& ticket = *record->ticket;
    const bool first = counted_once.insert(&ticket).second;
    for (std::size_t g = 0; g < ticket.tables.size(); ++g) {
      TableWork& work = all[ticket.tables[g]];
      Source source = source_of(shard, *record, static_cast<int>(g), whole);
      source.counted_once = first;
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
    // Whatever the caller's offsets say by now, each item is in one bag.
    std::int64_t i = s.first;
    for (std::int64_t bag = 0; bag < s.bags; ++bag) {
      const bool last = bag + 1 == s.bags;
      const std::int64_t stop = last ? s.stop : std::min(read_once(s.offsets + bag + 1), s.stop);
      for (; i < stop; ++i) {
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

}  // namespace shoal
