// Segments given by the segment of each row, in any order.
#include <atomic>

#include "ops_buckets.h"
#include "ops_segments.h"
#include "threads.h"
#include "prefetch.h"
#include "segments_impl.h"

namespace shoal {
namespace {

struct SegmentIndex {
  const std::int64_t* index;
  std::int64_t count, segments;
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

// The count when there is none: the span before may have ended in an index so far outside that its
// difference overflowed.
std::int64_t first_fall(const SegmentIndex& in, std::int64_t from) {
  while (from < in.count && (from == 0 || in.index[from] >= in.index[from - 1])) ++from;
  return from;
}

// Ends of runs: offsets[segment + 1] is the last position of its run, plus one. A run that goes on
// in the next span is left to that one. First position that is out of range, or -1.
std::int64_t scan_span(const SegmentIndex& in, std::int64_t first, std::int64_t last,
                       std::int64_t* offsets, std::int64_t& unsorted) {
  constexpr std::int64_t kBlock = 2048;
  std::int64_t own_end = last;
  if (last < in.count) {
    while (own_end > first && in.index[own_end - 1] == in.index[last]) --own_end;
  }
  for (std::int64_t i = first; i < last; i += kBlock) {
    const std::int64_t stop = std::min(i + kBlock, last);
    const std::int64_t before = i == 0 ? in.index[0] : in.index[i - 1];
    const Signs signs = signs_of(in.index + i, stop - i, before, in.segments);
    if (signs.outside) {
      while (in.index[i] >= 0 && in.index[i] < in.segments) ++i;
      return i;
    }
    if (signs.falls && unsorted < 0) unsorted = first_fall(in, i);
    if (unsorted >= 0) continue;
    for (std::int64_t k = i; k < std::min(stop, own_end); ++k) {
      // Spans of an unsorted index may meet here; what they leave is overwritten.
      std::atomic_ref<std::int64_t>(offsets[in.index[k] + 1])
          .store(k + 1, std::memory_order_relaxed);
    }
  }
  return -1;
}

// A sorted index's ends of runs. First position that is out of range, and first unsorted one.
std::pair<std::int64_t, std::int64_t> scan(const SegmentIndex& in, std::int64_t* offsets,
                                           int threads) {
  const Shares shares{in.count, worth_threads(in.count * 8, threads)};
  std::vector<std::int64_t> unsorted(static_cast<std::size_t>(shares.count), -1);
  std::fill_n(offsets, in.segments + 1, 0);
  const std::int64_t bad = over_shares(
      shares, threads, [&](std::int64_t share, std::int64_t first, std::int64_t last) {
        return scan_span(in, first, last, offsets, unsorted[static_cast<std::size_t>(share)]);
      });
  return {bad, first_of(unsorted)};
}

// A stable counting sort: each part counts its own, then places behind all parts before it.
void sort_index(const SegmentIndex& in, std::int64_t* offsets, std::int64_t* order, int threads) {
  const std::int64_t most = std::max<std::int64_t>(4 * in.count / in.segments, 1);
  const Shares shares{in.count,
                      std::min<std::int64_t>(worth_threads(in.count * 8, threads), most)};
  const auto room = [order](std::int64_t) { return order; };
  partition_into<std::int64_t>(
      shares, in.segments, threads, offsets, room,
      [&in](std::int64_t first, std::int64_t last, auto put) -> std::int64_t {
        for (std::int64_t i = first; i < last; ++i) put(in.index[i], i);
        return -1;
      });
}

// Rows [first, last) of the gradient. First position out of range, or -1.
template <class T>
std::int64_t spread_share(const SegmentTable& t, SegmentMode mode, std::int64_t first,
                          std::int64_t last) {
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(t.values, row_bytes, t.rows);
  std::int64_t bad = -1;
  const auto allowed = [&t](std::int64_t segment) { return segment >= 0 && segment < t.segments; };
  // Gradient rows lie anywhere: they are asked for long before they are read. Forced inline: see
  // prefetch.h.
  const auto ask = [&](std::int64_t i) __attribute__((always_inline)) {
    constexpr std::int64_t kAhead = 32;
    if (i + kAhead >= last || !allowed(t.index[i + kAhead])) return;
    const std::int64_t next = t.index[i + kAhead] * row_bytes;
    prefetch_row(static_cast<const char*>(t.parts[0].data) + next, row_bytes);
    if (t.norms != nullptr) prefetch_row(static_cast<const char*>(t.norms) + next, row_bytes);
  };
  const bool divides = mode == SegmentMode::mean || mode == SegmentMode::sqrtn;
  const auto each = [&](const auto& write) {
    for (std::int64_t i = first; i < last; ++i) {
      ask(i);
      const std::int64_t segment = t.index[i];
      if (!allowed(segment)) {
        bad = i;
        return;
      }
      const std::int64_t rows = divides ? t.offsets[segment + 1] - t.offsets[segment] : 1;
      write(i, segment, divisor_of<T>(mode, rows));
    }
  };
  const T* const grads = pointer<T>(t.parts[0].data);
  T* const out = pointer<T>(t.values);
  const std::int64_t dim = t.dim;
  const bool narrow = mode != SegmentMode::l2 && as_one<T>(dim, [=, &each]<int n>() {
    each([=](std::int64_t i, std::int64_t segment, T divisor) {
      Lanes<T, n> row;
      row.load_row(grads + segment * dim, dim);
      row.divide(divisor);
      row.store_row(out + i * dim, dim, stream);
    });
  });
  if (!narrow) {
    std::vector<T> scratch(static_cast<std::size_t>(dim));
    each([&](std::int64_t i, std::int64_t segment, T divisor) {
      const T* row = gradient_row<T>(t, segment, scratch.data());
      spread_rows<T>(t, row, divisor, i, 1, 0, dim, stream);
    });
  }
  end_stream(stream);
  return bad;
}

}  // namespace

std::int64_t spread_by_index(const SegmentTable& table, SegmentMode mode, bool is_double,
                             int threads) {
  const std::int64_t bytes = table.rows * (table.dim * (is_double ? 8 : 4) + 8);
  const int lanes = worth_threads(bytes, threads);
  const Shares shares{table.rows, lanes == 1 ? 1 : std::min<std::int64_t>(lanes * 4, table.rows)};
  return over_shares(shares, lanes, [&](std::int64_t, std::int64_t first, std::int64_t last) {
    return is_double ? spread_share<double>(table, mode, first, last)
                     : spread_share<float>(table, mode, first, last);
  });
}

std::int64_t group_index(const std::int64_t* index, std::int64_t* offsets, std::int64_t* order,
                         std::int64_t count, std::int64_t segments, int threads) {
  const SegmentIndex in{index, count, segments};
  const auto [bad, unsorted] = scan(in, offsets, threads);
  if (bad >= 0 || (order == nullptr && unsorted >= 0)) return bad >= 0 ? bad : unsorted;
  if (unsorted >= 0) {
    sort_index(in, offsets, order, threads);
    return -1;
  }
  // Segments without rows end where the one before ends.
  for (std::int64_t b = 1; b <= segments; ++b) {
    offsets[b] = std::max(offsets[b], offsets[b - 1]);
  }
  if (order != nullptr && count > 0) order[0] = -1;
  return -1;
}

}  // namespace shoal
