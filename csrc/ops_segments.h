#pragma once
// Sums, means and norms of segments of rows, and their gradients. Segment b of a table is rows
// offsets[b] .. offsets[b + 1] - 1. Rows of a segment are added in order by one thread (columns of
// a very long one by several), so results do not depend on the number of threads.
#include <cstdint>
#include <memory>
#include <vector>

#include "buffers.h"

namespace shoal {

enum class SegmentMode : std::uint8_t { sum, mean, sqrtn, l2 };

// One side of a table's columns: `width` of them, dense in [segments, width].
struct SegmentPart {
  void* data;
  std::int64_t width;
};

struct SegmentTable {
  const std::int64_t* offsets = nullptr;  // [segments + 1]
  const std::int64_t* order = nullptr;    // row at each position; null: the position itself
  const std::int64_t* index = nullptr;    // spread: segment of each row; null: as offsets say
  std::int64_t segments = 0;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  void* values = nullptr;        // [rows, dim]; reduce reads it, spread writes it
  const void* inputs = nullptr;  // l2 spread: what reduce read
  const void* norms = nullptr;   // l2 spread: what reduce wrote, one part
  std::vector<SegmentPart> parts;
};

// Where a value is not allowed; position -1: nowhere.
struct BadPlace {
  std::int64_t table = -1;
  std::int64_t position = -1;
};

// The place is one of an offset, or of an index where a table has one. Nothing is read or written
// through a bad one.
BadPlace reduce_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads);
BadPlace spread_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads);

// First `length` rows of each segment -> out [segments, length], zero padded; and back, zeros for
// rows beyond the length. First bad offset or -1.
std::int64_t first_n(const char* source, const std::int64_t* offsets, char* out,
                     std::int64_t segments, std::int64_t rows, std::int64_t length,
                     std::int64_t row_bytes, bool back, int threads);

// Segment of each row.
std::int64_t write_row_ids(const std::int64_t* offsets, std::int64_t* out, std::int64_t segments,
                           std::int64_t rows, int threads);

// Writes the offsets [segments + 1] of an index, and its positions by segment, in input order, to
// `order` [count]; order[0] is -1 when the index is sorted, and the rest unwritten. No order: the
// index must be sorted. First position out of [0, segments), or below the one before, or -1.
std::int64_t group_index(const std::int64_t* index, std::int64_t* offsets, std::int64_t* order,
                         std::int64_t count, std::int64_t segments, int threads);

// What group_index left of an order of `rows`: null where rows lie in order.
inline const std::int64_t* order_of(const std::int64_t* order, std::int64_t rows) {
  return order == nullptr || rows == 0 || order[0] < 0 ? nullptr : order;
}

}  // namespace shoal
