#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "bind_ops.h"
#include "ops_flat.h"
#include "ops_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using Address = std::uintptr_t;
using Sizes = std::vector<std::int64_t>;
using Addresses = std::vector<Address>;
using Free = nb::call_guard<nb::gil_scoped_release>;

Sizes splits_of(const Sizes& counts) {
  Sizes splits(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), splits.begin() + 1);
  return splits;
}

template <class T>
std::vector<T*> all_at(const Addresses& addresses) {
  std::vector<T*> result;
  for (const Address address : addresses) result.push_back(at_address<T>(address));
  return result;
}

std::int64_t match(Address ids, std::int64_t rows, Address query, std::int64_t n, Address index,
                   int threads) {
  return match_rows(at_address<const std::int64_t>(ids), rows,
                    at_address<const std::int64_t>(query), n, at_address<std::int64_t>(index),
                    threads);
}

std::int64_t gather(const Addresses& arrays, const Sizes& counts, std::size_t row_bytes,
                    Address index, std::int64_t n, Address out, int threads) {
  const RowArrays rows{all_at<const char>(arrays), splits_of(counts), row_bytes};
  return gather_rows(rows, at_address<const std::int64_t>(index), n, at_address<char>(out),
                     threads);
}

std::int64_t scatter(Address grad, Address index, std::int64_t n, std::int64_t rows,
                     std::int64_t dim, bool is_double, Address out, int threads) {
  const auto* at = at_address<const std::int64_t>(index);
  if (is_double) {
    return scatter_rows(at_address<const double>(grad), at, n, rows, dim, at_address<double>(out),
                        threads);
  }
  return scatter_rows(at_address<const float>(grad), at, n, rows, dim, at_address<float>(out),
                      threads);
}

template <class Row>
FlatLists<Row> lists_of(const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                        const Sizes& dims) {
  return FlatLists<Row>{all_at<Row>(rows), all_at<const std::int64_t>(offsets), splits_of(counts),
                        dims};
}

std::int64_t flat_gather(Address flat, std::int64_t size, std::size_t element_bytes,
                         const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                         const Sizes& dims, int threads) {
  return gather_flat(at_address<const char>(flat), size, element_bytes,
                     lists_of<char>(rows, offsets, counts, dims), threads);
}

std::int64_t flat_scatter(const Addresses& rows, const Addresses& offsets, const Sizes& counts,
                          const Sizes& dims, std::int64_t size, double scale, bool is_double,
                          Address flat, int threads) {
  if (is_double) {
    return scatter_flat(lists_of<const double>(rows, offsets, counts, dims), size, scale,
                        at_address<double>(flat), threads);
  }
  return scatter_flat(lists_of<const float>(rows, offsets, counts, dims), size,
                      static_cast<float>(scale), at_address<float>(flat), threads);
}

OffsetMap map_of(Address positions, Address splits, const Sizes& dims, Address offsets,
                 std::int64_t n_offsets, Address offset_splits, std::int64_t keys) {
  return OffsetMap{at_address<const std::int64_t>(positions),
                   at_address<const std::int64_t>(splits),
                   dims,
                   at_address<const std::int64_t>(offsets),
                   n_offsets,
                   at_address<const std::int64_t>(offset_splits),
                   keys};
}

std::pair<int, std::int64_t> checked(const MapCheck& check) {
  return {static_cast<int>(check.fault), check.at};
}

std::pair<int, std::int64_t> fill(Address positions, std::int64_t n, Address splits,
                                  const Sizes& dims, Address offsets, std::int64_t n_offsets,
                                  Address offset_splits, std::int64_t keys, Address value,
                                  std::int64_t length, std::size_t element_bytes, Address buffer,
                                  std::int64_t size, int threads) {
  const OffsetMap map = map_of(positions, splits, dims, offsets, n_offsets, offset_splits, keys);
  const MapCheck check = check_map(map, n, length, size, threads);
  if (check.fault == MapFault::none) {
    fill_offsets(map, at_address<const char>(value), element_bytes, at_address<char>(buffer),
                 threads);
  }
  return checked(check);
}

std::pair<int, std::int64_t> sum(Address positions, std::int64_t n, Address splits,
                                 const Sizes& dims, Address offsets, std::int64_t n_offsets,
                                 Address offset_splits, std::int64_t keys, Address buffer,
                                 std::int64_t size, bool is_double, Address value,
                                 std::int64_t length, int threads) {
  const OffsetMap map = map_of(positions, splits, dims, offsets, n_offsets, offset_splits, keys);
  const MapCheck check = check_map(map, n, length, size, threads);
  if (check.fault != MapFault::none) return checked(check);
  if (is_double) {
    sum_offsets(map, at_address<const double>(buffer), at_address<double>(value), threads);
  } else {
    sum_offsets(map, at_address<const float>(buffer), at_address<float>(value), threads);
  }
  return checked(check);
}

}  // namespace

void bind_rows_ops(nb::module_& m) {
  m.def("match_rows", &match, "ids"_a, "rows"_a, "query"_a, "n"_a, "index"_a, "threads"_a, Free());
  m.def("gather_rows", &gather, "arrays"_a, "counts"_a, "row_bytes"_a, "index"_a, "n"_a, "out"_a,
        "threads"_a, Free());
  m.def("scatter_rows", &scatter, "grad"_a, "index"_a, "n"_a, "rows"_a, "dim"_a, "is_double"_a,
        "out"_a, "threads"_a, Free());
  m.def("gather_flat", &flat_gather, "flat"_a, "size"_a, "element_bytes"_a, "rows"_a, "offsets"_a,
        "counts"_a, "dims"_a, "threads"_a, Free());
  m.def("scatter_flat", &flat_scatter, "rows"_a, "offsets"_a, "counts"_a, "dims"_a, "size"_a,
        "scale"_a, "is_double"_a, "flat"_a, "threads"_a, Free());
  m.def("fill_offsets", &fill, "positions"_a, "n"_a, "splits"_a, "dims"_a, "offsets"_a,
        "n_offsets"_a, "offset_splits"_a, "keys"_a, "value"_a, "length"_a, "element_bytes"_a,
        "buffer"_a, "size"_a, "threads"_a, Free());
  m.def("sum_offsets", &sum, "positions"_a, "n"_a, "splits"_a, "dims"_a, "offsets"_a,
        "n_offsets"_a, "offset_splits"_a, "keys"_a, "buffer"_a, "size"_a, "is_double"_a, "value"_a,
        "length"_a, "threads"_a, Free());
}

}  // namespace shoal
