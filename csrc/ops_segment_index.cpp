// Segments given by the segment of each row, in any order.
#include <atomic>

#include "ops_segments.h"
#include "pool.h"
#include "segments_impl.h"

namespace shoal {
namespace {

struct Span {
  std::int64_t first, last;
};

Span span_of(std::int64_t count, std::int64_t part, std::int64_t parts) {
  return {count / parts * part + std::min(part, count % parts),
          count / parts * (part + 1) + std::min(part + 1, count % parts)};
}

std::int64_t first_of(const std::vector<std::int64_t>& places) {
  for (const std::int64_t place : places) {
    if (place >= 0) return place;
  }
  return -1;
}

// Writes the offsets of a sorted index and says where it is not sorted or not allowed.
struct Scan {
  std::vector<std::int64_t> bad, unsorted;
};

void scan_span(const SegmentIndex& in, Span span, std::int64_t* offsets, std::int64_t& bad,
               std::int64_t& unsorted) {
  std::int64_t before = span.first == 0 ? -1 : in.index[span.first - 1];
  if (before < -1 || before >= in.segments) return;  // the part before reports it
  for (std::int64_t i = span.first; i < span.last; ++i) {
    const std::int64_t segment = in.index[i];
    if (segment == before && i > 0) continue;
    if (segment < 0 || segment >= in.segments) {
      bad = i;
      return;
    }
    if (segment < before && unsorted < 0) unsorted = i;
    if (unsorted < 0) {
      // Parts of an unsorted index may meet here; what they leave is overwritten.
      for (std::int64_t b = before + 1; b <= segment; ++b) {
        std::atomic_ref<std::int64_t>(offsets[b]).store(i, std::memory_order_relaxed);
      }
    }
    before = segment;
  }
}

Scan scan(const SegmentIndex& in, std::int64_t* offsets, int threads) {
  const std::int64_t parts = worth_threads(in.count * 8, threads);
  const auto size = static_cast<std::size_t>(parts);
  Scan result{std::vector<std::int64_t>(size, -1), std::vector<std::int64_t>(size, -1)};
  Pool::instance().run(parts, threads, [&](std::int64_t part, int) {
    const auto at = static_cast<std::size_t>(part);
    scan_span(in, span_of(in.count, part, parts), offsets, result.bad[at], result.unsorted[at]);
  });
  return result;
}

// A stable counting sort: each part counts its own, then places behind all parts before it.
// Writes the offsets, and the order where there is one.
void sort_index(const SegmentIndex& in, std::int64_t* offsets, std::int64_t* order, int threads) {
  const std::int64_t most = std::max<std::int64_t>(4 * in.count / in.segments, 1);
  const std::int64_t parts = std::min<std::int64_t>(worth_threads(in.count * 8, threads), most);
  const auto next = std::make_unique<std::int64_t[]>(static_cast<std::size_t>(parts * in.segments));
  Pool::instance().run(parts, threads, [&](std::int64_t part, int) {
    std::int64_t* counts = next.get() + part * in.segments;
    const Span span = span_of(in.count, part, parts);
    for (std::int64_t i = span.first; i < span.last; ++i) ++counts[in.index[i]];
  });
  std::int64_t total = 0;
  for (std::int64_t b = 0; b < in.segments; ++b) {
    offsets[b] = total;
    for (std::int64_t part = 0; part < parts; ++part) {
      std::int64_t& cell = next[static_cast<std::size_t>(part * in.segments + b)];
      const std::int64_t here = cell;
      cell = total;
      total += here;
    }
  }
  offsets[in.segments] = total;
  if (order == nullptr) return;
  Pool::instance().run(parts, threads, [&](std::int64_t part, int) {
    std::int64_t* places = next.get() + part * in.segments;
    const Span span = span_of(in.count, part, parts);
    for (std::int64_t i = span.first; i < span.last; ++i) order[places[in.index[i]]++] = i;
  });
}

// Rows [first, last) of the gradient; runs of one segment share its row.
template <class T>
std::int64_t spread_span(const SegmentIndex& in, const SegmentTable& t, SegmentMode mode,
                         Span span) {
  constexpr std::int64_t kAhead = 32;
  std::vector<T> scratch(static_cast<std::size_t>(t.dim));
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(t.values, row_bytes, in.count);
  const auto allowed = [&in](std::int64_t segment) { return segment >= 0 && segment < in.segments; };
  std::int64_t fetched = span.first;
  for (std::int64_t i = span.first; i < span.last;) {
    const std::int64_t ahead = std::min(i + kAhead, span.last);
    for (; fetched < ahead; ++fetched) {
      const std::int64_t next = in.index[fetched];
      if (!allowed(next)) continue;
      for (const SegmentPart& part : t.parts) {
        const auto width = part.width * static_cast<std::int64_t>(sizeof(T));
        prefetch_row(static_cast<const char*>(part.data) + next * width, width);
      }
    }
    const std::int64_t segment = in.index[i];
    if (!allowed(segment)) return i;
    std::int64_t stop = i + 1;
    while (stop < span.last && in.index[stop] == segment) ++stop;
    const std::int64_t count =
        t.offsets == nullptr ? 1 : t.offsets[segment + 1] - t.offsets[segment];
    const T* row = gradient_row<T>(t, segment, mode, count, scratch.data());
    spread_rows<T>(t, row, i, stop - i, 0, t.dim, stream);
    i = stop;
  }
  end_stream(stream);
  return -1;
}

}  // namespace

IndexGroups group_index(const SegmentIndex& index, std::int64_t* offsets, Grouping grouping,
                        int threads) {
  const Scan seen = scan(index, offsets, threads);
  IndexGroups groups;
  groups.bad = first_of(seen.bad);
  groups.unsorted = first_of(seen.unsorted);
  if (groups.bad >= 0) return groups;
  if (groups.unsorted < 0) {
    const std::int64_t last = index.count == 0 ? -1 : index.index[index.count - 1];
    for (std::int64_t b = last + 1; b <= index.segments; ++b) offsets[b] = index.count;
  } else if (grouping != Grouping::sorted_only) {
    if (grouping == Grouping::ordered) {
      const auto count = static_cast<std::size_t>(index.count);
      groups.order = std::make_unique_for_overwrite<std::int64_t[]>(count);
    }
    sort_index(index, offsets, groups.order.get(), threads);
  }
  return groups;
}

std::int64_t spread_by_index(const SegmentIndex& index, const SegmentTable& table,
                             SegmentMode mode, bool is_double, int threads) {
  const std::int64_t bytes = index.count * (table.dim * (is_double ? 8 : 4) + 8);
  const int lanes = worth_threads(bytes, threads);
  const std::int64_t parts = lanes == 1 ? 1 : std::min<std::int64_t>(lanes * 4, index.count);
  std::vector<std::int64_t> bad(static_cast<std::size_t>(parts), -1);
  Pool::instance().run(parts, lanes, [&](std::int64_t part, int) {
    const Span span = span_of(index.count, part, parts);
    bad[static_cast<std::size_t>(part)] =
        is_double ? spread_span<double>(index, table, mode, span)
                  : spread_span<float>(index, table, mode, span);
  });
  return first_of(bad);
}

}  // namespace shoal
