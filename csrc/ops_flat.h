#pragma once
// Rows of several widths in one flat buffer, found by the offset of their first element. Functions
// that return a position name the first bad item, counted through all lists, or -1; where one is
// bad, a fresh output is not to be read and a caller's buffer is unchanged.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

using Numbers = std::vector<std::int64_t>;
using NumberLists = std::vector<const std::int64_t*>;

// Row i of list k, of `counts[k]` rows, is `dims[k]` elements at rows[k] + i * dims[k], and at
// offsets[k][i] in the flat buffer of `size` elements.

// rows = flat[offset : offset + dim].
std::int64_t gather_flat(const std::vector<char*>& rows, const NumberLists& offsets,
                         const Numbers& counts, const Numbers& dims, const char* flat,
                         std::int64_t size, std::size_t element_bytes, int threads);

// flat = scale times the sum, in order of items, of the rows over each element.
template <class T>
std::int64_t scatter_flat(const std::vector<const T*>& rows, const NumberLists& offsets,
                          const Numbers& counts, const Numbers& dims, T* flat, std::int64_t size,
                          T scale, int threads);

// A map of unique keys to where they lie in a buffer of `size` elements is four arrays of `sizes`
// entries: positions, splits [dims + 1], offsets, offset splits [keys + 1]. Position p of
// [splits[k], splits[k + 1]) names a key of width dims[k]; key u lies at offsets[offset_splits[u]]
// .. offsets[offset_splits[u + 1] - 1]. `length` elements of values belong to the positions.
// What is wrong with one, and where: a position for `position`, an index of the named array
// otherwise. Nothing is read or written by a map with a fault.
enum MapFault : int { none, splits, length, position, offset_splits, offset };
using MapCheck = std::pair<int, std::int64_t>;

MapCheck check_map(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                   std::int64_t length, std::int64_t size, int threads);

// Copies each value row to all its offsets, which do not overlap.
MapCheck fill_offsets(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                      std::int64_t length, std::int64_t size, const char* value, char* buffer,
                      std::size_t element_bytes, int threads);

// Each value row = the sum of the buffer at its offsets, in their order.
template <class T>
MapCheck sum_offsets(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                     std::int64_t length, std::int64_t size, T* value, const T* buffer,
                     int threads);

}  // namespace shoal
