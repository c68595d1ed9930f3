// First rows of segments and back, and the segment of each row.
#include "ops_buckets.h"
#include "ops_segments.h"
#include "threads.h"
#include "segments_impl.h"

namespace shoal {
namespace {

// Calls body(segment, start, stop, limit) for segments in even parts, where `limit` is the last
// row of the part plus one. First bad offset or -1.
template <class Body>
std::int64_t over_segments(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
                           std::int64_t bytes, int threads, const Body& body) {
  std::int64_t bad_end = -1;
  if (!good_ends(offsets, segments, rows, bad_end)) return bad_end;
  const int lanes = worth_threads(bytes, threads);
  const std::int64_t work = rows + segments;
  const Shares shares{work, std::min<std::int64_t>(lanes == 1 ? 1 : lanes * 4, segments)};
  return over_shares(shares, lanes, [&](std::int64_t share, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = share == 0 ? 0 : segment_at(offsets, segments, begin);
    const std::int64_t last = end == work ? segments : segment_at(offsets, segments, end);
    const std::int64_t limit = std::min(offsets[last], rows);
    const std::int64_t bad = each_segment(
        offsets, rows, first, last,
        [&](auto segment, auto start, auto stop) { body(segment, start, stop, limit); });
    end_stream();
    return bad;
  });
}

// Prefetches what a later segment reads: where segments read less than lies between them, the
// hardware does not foresee it. Forced inline: see prefetch.h.
__attribute__((always_inline)) inline void prefetch_bytes(const char* from, std::int64_t bytes) {
  constexpr std::int64_t kMost = 2048;
  const std::int64_t most = std::min(bytes, kMost);
  for (std::int64_t at = 0; at < most; at += 64) __builtin_prefetch(from + at, 0, 3);
}

constexpr std::int64_t kSegmentsAhead = 3;

}  // namespace

std::int64_t first_n(const char* source, const std::int64_t* offsets, char* out,
                     std::int64_t segments, std::int64_t rows, std::int64_t length,
                     std::int64_t row_bytes, bool back, int threads) {
  const std::int64_t written = back ? rows : segments * length;
  const bool stream = may_stream(out, row_bytes, written);
  const std::int64_t most = length * row_bytes;
  const auto unchecked = [=](std::int64_t b) {
    return std::clamp<std::int64_t>(offsets[b], 0, rows);
  };
  const auto one = [=](std::int64_t b, std::int64_t start, std::int64_t stop, std::int64_t) {
    if (const std::int64_t next = b + kSegmentsAhead; next < segments) {
      const std::int64_t begin = unchecked(next);
      const std::int64_t kept = std::min(unchecked(next + 1) - begin, length);
      prefetch_bytes(source + (back ? next * length : begin) * row_bytes, kept * row_bytes);
    }
    const std::int64_t held = (stop - start) * row_bytes, filled = std::min(held, most);
    const auto rest = static_cast<std::size_t>((back ? held : most) - filled);
    const char* const from = source + (back ? b * most : start * row_bytes);
    char* const to = out + (back ? start * row_bytes : b * most);
    if (stream) {
      stream_bytes(to, from, static_cast<std::size_t>(filled));
      stream_zeros(to + filled, rest);
    } else {
      // Of nothing there may be no address.
      if (filled > 0) std::memcpy(to, from, static_cast<std::size_t>(filled));
      std::memset(to + filled, 0, rest);
    }
  };
  return over_segments(offsets, segments, rows, (rows + written) * row_bytes, threads, one);
}

std::int64_t write_row_ids(const std::int64_t* offsets, std::int64_t* out, std::int64_t segments,
                           std::int64_t rows, int threads) {
  // Short segments write a burst, whose end the segments after overwrite: no loop to guess.
  constexpr std::int64_t kBurst = 8;
  return over_segments(
      offsets, segments, rows, (rows + segments) * 8, threads,
      [out](std::int64_t b, std::int64_t start, std::int64_t stop, std::int64_t limit) {
        if (stop - start <= kBurst && start + kBurst <= limit) {
          for (std::int64_t r = 0; r < kBurst; ++r) out[start + r] = b;
        } else {
          for (std::int64_t r = start; r < stop; ++r) out[r] = b;
        }
      });
}

}  // namespace shoal
