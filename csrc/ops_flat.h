#pragma once
// Rows of several widths in one flat buffer, found by the offset of their first element. Functions
// that return a position name the first bad item, counted through all lists, or -1; where one is
// bad, a fresh output is not to be read and a caller's buffer is unchanged.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// Row i of list k is `dims[k]` elements at rows[k] + i * dims[k], and at offsets[k][i] in the flat
// buffer.
template <class Row>
struct FlatLists {
  std::vector<Row*> rows;
  std::vector<const std::int64_t*> offsets;
  std::vector<std::int64_t> splits;  // items before each list, and in all
  std::vector<std::int64_t> dims;
};

// rows = flat[offset : offset + dim].
std::int64_t gather_flat(const char* flat, std::int64_t size, std::size_t element_bytes,
                         const FlatLists<char>& lists, int threads);

// flat = scale times the sum, in order of items, of the rows over each element.
template <class T>
std::int64_t scatter_flat(const FlatLists<const T>& lists, std::int64_t size, T scale, T* flat,
                          int threads);

// Where unique keys lie in a buffer. Position p of [splits[k], splits[k+1]) names a key of width
// dims[k]; key u lies at offsets[offset_splits[u]] .. offsets[offset_splits[u+1]-1].
struct OffsetMap {
  const std::int64_t* positions;
  const std::int64_t* splits;  // [dims + 1]
  std::vector<std::int64_t> dims;
  const std::int64_t* offsets;
  std::int64_t n_offsets;
  const std::int64_t* offset_splits;  // [keys + 1]
  std::int64_t keys;
};

// What is wrong with a map, and where: a position for `position`, an index of the named array
// otherwise.
enum class MapFault { none, splits, length, position, offset_splits, offset };
struct MapCheck {
  MapFault fault = MapFault::none;
  std::int64_t at = -1;
};

// `positions` of the map have n entries; `length` elements of values belong to them; the buffer
// has `size` elements.
MapCheck check_map(const OffsetMap& map, std::int64_t n, std::int64_t length, std::int64_t size,
                   int threads);

// Copies each value row to all its offsets. The map is checked, its offsets do not overlap.
void fill_offsets(const OffsetMap& map, const char* value, std::size_t element_bytes, char* buffer,
                  int threads);

// Each value row = the sum of the buffer at its offsets, in their order. The map is checked.
template <class T>
void sum_offsets(const OffsetMap& map, const T* buffer, T* value, int threads);

}  // namespace shoal
