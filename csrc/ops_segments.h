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
  std::int64_t segments = 0;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  void* values = nullptr;        // [rows, dim]; reduce reads it, spread writes it
  const void* inputs = nullptr;  // l2 spread: what reduce read
  const void* pooled = nullptr;  // l2 spread: what reduce wrote, one part
  std::vector<SegmentPart> parts;
};

// Where a value is not allowed; position -1: nowhere.
struct BadPlace {
  std::int64_t table = -1;
  std::int64_t position = -1;
};

// The place is one of an offset. Nothing is read or written through a bad one.
BadPlace reduce_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads);
BadPlace spread_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads);

struct FirstN {
  const std::int64_t* offsets;  // [segments + 1]
  std::int64_t segments, rows, length, row_bytes;
};
// rows -> out [segments, length], zero padded; and back, zeros for rows beyond the length.
std::int64_t take_first_n(const FirstN& job, const char* rows, char* out, int threads);
std::int64_t return_first_n(const FirstN& job, const char* grads, char* out, int threads);

// Segment of each row.
std::int64_t write_row_ids(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
                           std::int64_t* out, int threads);

// Positions of an index by segment, in input order. `order` is null when the index is sorted.
struct IndexGroups {
  std::int64_t bad = -1;       // first position out of [0, segments)
  std::int64_t unsorted = -1;  // first position below the one before
  std::unique_ptr<Scratch<std::int64_t>> order;
};
struct SegmentIndex {
  const std::int64_t* index;
  std::int64_t count, segments;
};
enum class Grouping : std::uint8_t { sorted_only, counted, ordered };
// Fills offsets [segments + 1], unless a position is bad, or one is unsorted and may not be.
IndexGroups group_index(const SegmentIndex& index, std::int64_t* offsets, Grouping grouping,
                        int threads);

// Row i of table.values = gradient of row i. Returns the first position out of [0, segments), or -1.
std::int64_t spread_index(const SegmentIndex& index, SegmentTable& table, SegmentMode mode,
                          bool is_double, int threads);

}  // namespace shoal
