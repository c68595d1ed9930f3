// Segments given by the segment of each row, in any order.
#include <atomic>

#include "ops_segments.h"
#include "pool.h"
#include "prefetch.h"
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

// Where an index is not allowed, or not sorted.
struct Scan {
  std::vector<std::int64_t> bad, unsorted;
};

// What a block of an index holds, found without a branch for each.
struct Signs {
  bool outside, falls;
};

Signs signs_of(const std::int64_t* index, std::int64_t count, std::int64_t before,
               std::int64_t segments) {
  // A sign bit stays where a difference was negative. Differences may overflow only where an
  // index is outside, and then nothing else is asked.
  const auto most = static_cast<std::uint64_t>(segments) - 1;
  const auto* x = reinterpret_cast<const std::uint64_t*>(index);
  std::uint64_t outside = x[0] | (most - x[0]);
  std::uint64_t falls = x[0] - static_cast<std::uint64_t>(before);
  for (std::int64_t i = 1; i < count; ++i) {
    outside |= x[i] | (most - x[i]);
    falls |= x[i] - x[i - 1];
  }
  return {outside >> 63 != 0, falls >> 63 != 0};
}

std::int64_t first_bad(const SegmentIndex& in, std::int64_t from) {
  while (in.index[from] >= 0 && in.index[from] < in.segments) ++from;
  return from;
}

// The count when there is none: the span before may have ended in an index so far outside that its
// difference overflowed.
std::int64_t first_fall(const SegmentIndex& in, std::int64_t from) {
  while (from < in.count && (from == 0 || in.index[from] >= in.index[from - 1])) ++from;
  return from;
}

// Ends of runs: offsets[segment + 1] is the last position of its run, plus one. A run that goes on
// in the next span is left to that one.
void scan_span(const SegmentIndex& in, Span span, std::int64_t* offsets, std::int64_t& bad,
               std::int64_t& unsorted) {
  constexpr std::int64_t kBlock = 2048;
  std::int64_t own_end = span.last;
  if (span.last < in.count) {
    while (own_end > span.first && in.index[own_end - 1] == in.index[span.last]) --own_end;
  }
  for (std::int64_t i = span.first; i < span.last; i += kBlock) {
    const std::int64_t stop = std::min(i + kBlock, span.last);
    const std::int64_t before = i == 0 ? in.index[0] : in.index[i - 1];
    const Signs signs = signs_of(in.index + i, stop - i, before, in.segments);
    if (signs.outside) {
      bad = first_bad(in, i);
      return;
    }
    if (signs.falls && unsorted < 0) unsorted = first_fall(in, i);
    if (unsorted >= 0) continue;
    for (std::int64_t k = i; k < std::min(stop, own_end); ++k) {
      // Spans of an unsorted index may meet here; what they leave is overwritten.
      std::atomic_ref<std::int64_t>(offsets[in.index[k] + 1])
          .store(k + 1, std::memory_order_relaxed);
    }
  }
}

Scan scan(const SegmentIndex& in, std::int64_t* offsets, int threads) {
  const std::int64_t parts = worth_threads(in.count * 8, threads);
  const auto size = static_cast<std::size_t>(parts);
  Scan result{std::vector<std::int64_t>(size, -1), std::vector<std::int64_t>(size, -1)};
  std::fill_n(offsets, in.segments + 1, 0);
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

// Rows [first, last) of the gradient. First position out of range, or -1.
template <class T>
struct SpreadIndex {
  const SegmentIndex& in;
  const SegmentTable& t;
  SegmentMode mode;
  Span span;
  bool stream;
  std::int64_t& bad;

  bool allowed(std::int64_t segment) const { return segment >= 0 && segment < in.segments; }

  T divisor(std::int64_t segment) const {
    if (mode == SegmentMode::sum || mode == SegmentMode::l2) return T(1);
    return divisor_of<T>(mode, t.offsets[segment + 1] - t.offsets[segment]);
  }

  // Gradient rows lie anywhere: they are asked for long before they are read. Forced inline: see
  // prefetch.h.
  __attribute__((always_inline)) void prefetch(std::int64_t i) const {
    constexpr std::int64_t kAhead = 32;
    if (i + kAhead >= span.last || !allowed(in.index[i + kAhead])) return;
    const std::int64_t next = in.index[i + kAhead];
    for (const SegmentPart& part : t.parts) {
      const auto width = part.width * static_cast<std::int64_t>(sizeof(T));
      prefetch_row(static_cast<const char*>(part.data) + next * width, width);
    }
    if (t.pooled != nullptr) {
      const auto width = t.dim * static_cast<std::int64_t>(sizeof(T));
      prefetch_row(static_cast<const char*>(t.pooled) + next * width, width);
    }
  }

  // Whole rows of one block.
  template <int n>
  void operator()() const {
    const T* grads = pointer<T>(t.parts[0].data);
    T* out = pointer<T>(t.values) + span.first * t.dim;
    for (std::int64_t i = span.first; i < span.last; ++i, out += t.dim) {
      prefetch(i);
      const std::int64_t segment = in.index[i];
      if (!allowed(segment)) {
        bad = i;
        return;
      }
      Block<T, n> row;
      row.load_row(grads + segment * t.dim, t.dim);
      Finish<T>{divisor(segment), false}.apply(row);
      row.store_row(out, t.dim, stream);
    }
  }

  void any_rows() const {
    std::vector<T> scratch(static_cast<std::size_t>(t.dim));
    for (std::int64_t i = span.first; i < span.last; ++i) {
      prefetch(i);
      const std::int64_t segment = in.index[i];
      if (!allowed(segment)) {
        bad = i;
        return;
      }
      const T* row = gradient_row<T>(t, segment, scratch.data());
      spread_rows<T>(t, row, divisor(segment), i, 1, 0, t.dim, stream);
    }
  }
};

template <class T>
std::int64_t spread_span(const SegmentIndex& in, const SegmentTable& t, SegmentMode mode,
                         Span span) {
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(t.values, row_bytes, in.count);
  std::int64_t bad = -1;
  const SpreadIndex<T> spread{in, t, mode, span, stream, bad};
  const bool plain = t.parts.size() == 1 && mode != SegmentMode::l2;
  if (!plain || !as_one_block<T>(t.dim, spread)) spread.any_rows();
  end_stream(stream);
  return bad;
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

}  // namespace

IndexGroups group_index(const SegmentIndex& index, std::int64_t* offsets, Grouping grouping,
                        int threads) {
  const Scan seen = scan(index, offsets, threads);
  IndexGroups groups;
  groups.bad = first_of(seen.bad);
  groups.unsorted = first_of(seen.unsorted);
  if (groups.bad >= 0) return groups;
  if (groups.unsorted < 0) {
    // Segments without rows end where the one before ends.
    for (std::int64_t b = 1; b <= index.segments; ++b) {
      offsets[b] = std::max(offsets[b], offsets[b - 1]);
    }
  } else if (grouping != Grouping::sorted_only) {
    if (grouping == Grouping::ordered) {
      groups.order = std::make_unique<Scratch<std::int64_t>>(index.count);
    }
    sort_index(index, offsets, groups.order == nullptr ? nullptr : groups.order->data(), threads);
  }
  return groups;
}

std::int64_t spread_index(const SegmentIndex& index, SegmentTable& table, SegmentMode mode,
                          bool is_double, int threads) {
  // A copy of a row is as fast from anywhere. What is worked out once a segment, or needs counts,
  // is faster by the offsets that a sorted index has.
  if (mode == SegmentMode::sum) return spread_by_index(index, table, mode, is_double, threads);
  const Scratch<std::int64_t> offsets(index.segments + 1);
  const auto grouping = mode == SegmentMode::l2 ? Grouping::sorted_only : Grouping::counted;
  const IndexGroups groups = group_index(index, offsets.data(), grouping, threads);
  if (groups.bad >= 0) return groups.bad;
  table.offsets = offsets.data();
  if (groups.unsorted >= 0) return spread_by_index(index, table, mode, is_double, threads);
  spread_segments({table}, mode, is_double, threads);
  return -1;
}

}  // namespace shoal
