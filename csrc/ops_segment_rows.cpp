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
  SegmentTable table;
  table.offsets = offsets;
  table.segments = segments;
  table.rows = rows;
  const int lanes = worth_threads(bytes, threads);
  const std::int64_t work = rows + segments;
  const Shares shares{work, std::min<std::int64_t>(lanes == 1 ? 1 : lanes * 4, segments)};
  return over_shares(shares, lanes, [&](std::int64_t share, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = share == 0 ? 0 : segment_at(table, begin);
    const std::int64_t last = end == work ? segments : segment_at(table, end);
    const std::int64_t limit = std::min(offsets[last], rows);
    for (std::int64_t b = first; b < last; ++b) {
      if (!inside(offsets, b, rows)) return b + 1;
      body(b, offsets[b], offsets[b + 1], limit);
    }
    end_stream(true);
    return std::int64_t{-1};
  });
}

struct FirstN {
  const std::int64_t* offsets;  // [segments + 1]
  std::int64_t segments, rows, length, row_bytes;
};

// What a later segment reads: where segments read less than lies between them, the hardware does
// not foresee it.
void prefetch_segment(const FirstN& job, std::int64_t segment, const char* from) {
  if (segment >= job.segments || !inside(job.offsets, segment, job.rows)) return;
  constexpr std::int64_t kMost = 2048;
  const std::int64_t count = job.offsets[segment + 1] - job.offsets[segment];
  const std::int64_t kept = std::min({count, kMost, job.length});
  const std::int64_t bytes = std::min(kept * job.row_bytes, kMost);
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

constexpr std::int64_t kSegmentsAhead = 3;

}  // namespace

std::int64_t first_n(const char* source, const std::int64_t* offsets, char* out,
                     std::int64_t segments, std::int64_t rows, std::int64_t length,
                     std::int64_t row_bytes, bool back, int threads) {
  const FirstN job{offsets, segments, rows, length, row_bytes};
  const std::int64_t written = back ? rows : segments * length;
  const bool stream = may_stream(out, row_bytes, written);
  const std::int64_t most = length * row_bytes;
  const auto one = [&](std::int64_t b, std::int64_t start, std::int64_t stop, std::int64_t) {
    const std::int64_t next = b + kSegmentsAhead;
    // Not checked yet.
    const std::int64_t begin =
        back ? next * length : std::clamp<std::int64_t>(offsets[std::min(next, segments)], 0, rows);
    prefetch_segment(job, next, source + begin * row_bytes);
    const std::int64_t held = (stop - start) * row_bytes, filled = std::min(held, most);
    char* to = out + (back ? start * row_bytes : b * most);
    copy_bytes(to, source + (back ? b * most : start * row_bytes), filled, stream);
    zero_bytes(to + filled, (back ? held : most) - filled, stream);
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
