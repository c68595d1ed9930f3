#include <numeric>

#include "bind.h"
#include "ops_flat.h"
#include "ops_rows.h"

namespace nb = nanobind;

namespace shoal {
namespace {

Sizes splits_of(const Sizes& counts) {
  Sizes splits(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), splits.begin() + 1);
  return splits;
}

std::int64_t gather(const Addresses& arrays, const Sizes& counts, std::size_t row_bytes,
                    Address index, std::int64_t n, Address out, int threads) {
  const RowArrays rows{all_at<const char>(arrays), splits_of(counts), row_bytes};
  return gather_rows(rows, at<const std::int64_t>(index), n, at<char>(out), threads);
}

template <class Row>
FlatLists<Row> lists_of(const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                        const Sizes& dims) {
  return FlatLists<Row>{all_at<Row>(rows), all_at<const std::int64_t>(offsets), splits_of(counts),
                        dims};
}

std::int64_t flat_gather(const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                         const Sizes& dims, Address flat, std::int64_t size,
                         std::size_t element_bytes, int threads) {
  return gather_flat(at<const char>(flat), size, element_bytes,
                     lists_of<char>(rows, offsets, counts, dims), threads);
}

template <class T>
std::int64_t flat_scatter(const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                          const Sizes& dims, Address flat, std::int64_t size, double scale,
                          int threads) {
  return scatter_flat(lists_of<const T>(rows, offsets, counts, dims), size, static_cast<T>(scale),
                      at<T>(flat), threads);
}

// run(map) if the map fits its value and its buffer; the fault and its place. A map is four tensors
// (positions, splits, offsets, offset splits) and the widths of its tables.
template <class Run>
std::pair<int, std::int64_t> with_map(const Addresses& map_at, const Sizes& map_sizes,
                                      const Sizes& dims, std::int64_t length, std::int64_t size,
                                      int threads, const Run& run) {
  const OffsetMap map{at<const std::int64_t>(map_at[0]),
                      at<const std::int64_t>(map_at[1]),
                      dims,
                      at<const std::int64_t>(map_at[2]),
                      map_sizes[2],
                      at<const std::int64_t>(map_at[3]),
                      map_sizes[3] - 1};
  const MapCheck check = check_map(map, map_sizes[0], length, size, threads);
  if (check.fault == MapFault::none) run(map);
  return {static_cast<int>(check.fault), check.at};
}

std::pair<int, std::int64_t> check(const Addresses& map_at, const Sizes& map_sizes,
                                   const Sizes& dims, std::int64_t length, std::int64_t size,
                                   int threads) {
  return with_map(map_at, map_sizes, dims, length, size, threads, [](const OffsetMap&) {});
}

std::pair<int, std::int64_t> fill(const Addresses& map_at, const Sizes& map_sizes,
                                  const Sizes& dims, std::int64_t length, std::int64_t size,
                                  Address value, Address buffer, std::size_t element_bytes,
                                  int threads) {
  return with_map(map_at, map_sizes, dims, length, size, threads, [&](const OffsetMap& map) {
    fill_offsets(map, at<const char>(value), element_bytes, at<char>(buffer), threads);
  });
}

template <class T>
std::pair<int, std::int64_t> sum(const Addresses& map_at, const Sizes& map_sizes,
                                 const Sizes& dims, std::int64_t length, std::int64_t size,
                                 Address value, Address buffer, int threads) {
  return with_map(map_at, map_sizes, dims, length, size, threads, [&](const OffsetMap& map) {
    sum_offsets(map, at<const T>(buffer), at<T>(value), threads);
  });
}

}  // namespace

void bind_rows_ops(nb::module_& m) {
  m.def("match_rows", Wired<&match_rows>::call, Release());
  m.def("gather_rows", gather, Release());
  m.def("scatter_rows_f32", Wired<&scatter_rows<float>>::call, Release());
  m.def("scatter_rows_f64", Wired<&scatter_rows<double>>::call, Release());
  m.def("gather_flat", flat_gather, Release());
  m.def("scatter_flat_f32", flat_scatter<float>, Release());
  m.def("scatter_flat_f64", flat_scatter<double>, Release());
  m.def("check_map", check, Release());
  m.def("fill_offsets", fill, Release());
  m.def("sum_offsets_f32", sum<float>, Release());
  m.def("sum_offsets_f64", sum<double>, Release());
}

}  // namespace shoal
