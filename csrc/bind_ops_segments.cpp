#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind_ops.h"
#include "ops_segments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Sizes = std::vector<std::int64_t>;
using Place = std::pair<std::int64_t, std::int64_t>;

Place place_of(const BadPlace& bad) { return {bad.table, bad.position}; }

SegmentTable table_of(Address values, Address offsets, std::int64_t segments, std::int64_t rows,
                      std::int64_t dim, Address pooled) {
  SegmentTable table;
  table.offsets = at_address<const std::int64_t>(offsets);
  table.segments = segments;
  table.rows = rows;
  table.dim = dim;
  table.values = at_address<void>(values);
  table.parts.push_back({at_address<void>(pooled), dim});
  return table;
}

// One table's arguments as they come from Python; `parts` numbers each table's entries of
// `pooled` and `widths`.
std::vector<SegmentTable> tables_of(const Addresses& values, const Addresses& offsets,
                                    const Sizes& segments, const Sizes& rows,
                                    const Addresses& pooled, const Sizes& widths,
                                    const Sizes& parts) {
  std::vector<SegmentTable> tables(values.size());
  std::size_t next = 0;
  for (std::size_t k = 0; k < values.size(); ++k) {
    SegmentTable& t = tables[k];
    t.offsets = at_address<const std::int64_t>(offsets[k]);
    t.segments = segments[k];
    t.rows = rows[k];
    t.values = at_address<void>(values[k]);
    for (std::int64_t part = 0; part < parts[k]; ++part, ++next) {
      t.parts.push_back({at_address<void>(pooled[next]), widths[next]});
      t.dim += widths[next];
    }
  }
  return tables;
}

std::int64_t reduce(Address values, Address offsets, Address out, std::int64_t segments,
                    std::int64_t rows, std::int64_t dim, int mode, bool is_double, int threads) {
  const SegmentTable table = table_of(values, offsets, segments, rows, dim, out);
  return reduce_segments({table}, static_cast<SegmentMode>(mode), is_double, threads).position;
}

std::int64_t spread(Address grads, Address offsets, Address inputs, Address pooled, Address out,
                    std::int64_t segments, std::int64_t rows, std::int64_t dim, int mode,
                    bool is_double, int threads) {
  SegmentTable table = table_of(out, offsets, segments, rows, dim, grads);
  table.inputs = at_address<const void>(inputs);
  table.pooled = at_address<const void>(pooled);
  return spread_segments({table}, static_cast<SegmentMode>(mode), is_double, threads).position;
}

Place fused_reduce(const Addresses& values, const Addresses& offsets, const Sizes& segments,
                   const Sizes& rows, const Addresses& pooled, const Sizes& widths,
                   const Sizes& parts, bool is_double, int threads) {
  const auto tables = tables_of(values, offsets, segments, rows, pooled, widths, parts);
  return place_of(reduce_segments(tables, SegmentMode::sum, is_double, threads));
}

Place fused_spread(const Addresses& values, const Addresses& offsets, const Sizes& segments,
                   const Sizes& rows, const Addresses& pooled, const Sizes& widths,
                   const Sizes& parts, bool is_double, int threads) {
  const auto tables = tables_of(values, offsets, segments, rows, pooled, widths, parts);
  return place_of(spread_segments(tables, SegmentMode::sum, is_double, threads));
}

Place index_reduce(Address values, Address index, const Addresses& pooled, const Sizes& widths,
                   std::int64_t count, std::int64_t segments, int mode, bool sorted,
                   bool is_double, int threads) {
  const SegmentIndex in{at_address<const std::int64_t>(index), count, segments};
  const Scratch<std::int64_t> offsets(segments + 1);
  const auto grouping = sorted ? Grouping::sorted_only : Grouping::ordered;
  const IndexGroups groups = group_index(in, offsets.data(), grouping, threads);
  if (groups.bad >= 0 || (sorted && groups.unsorted >= 0)) return {groups.bad, groups.unsorted};
  const Addresses from{values};
  const Addresses at{reinterpret_cast<Address>(offsets.data())};
  const Sizes parts{static_cast<std::int64_t>(pooled.size())};
  auto tables = tables_of(from, at, {segments}, {count}, pooled, widths, parts);
  if (groups.order != nullptr) tables[0].order = groups.order->data();
  reduce_segments(tables, static_cast<SegmentMode>(mode), is_double, threads);
  return {-1, -1};
}

std::int64_t index_spread(const Addresses& grads, const Sizes& widths, Address index,
                          Address inputs, Address pooled, Address out, std::int64_t count,
                          std::int64_t segments, int mode, bool is_double, int threads) {
  const SegmentIndex in{at_address<const std::int64_t>(index), count, segments};
  const Sizes parts{static_cast<std::int64_t>(grads.size())};
  auto tables = tables_of({out}, {0}, {segments}, {count}, grads, widths, parts);
  tables[0].inputs = at_address<const void>(inputs);
  tables[0].pooled = at_address<const void>(pooled);
  return spread_index(in, tables[0], static_cast<SegmentMode>(mode), is_double, threads);
}

Place write_offsets(Address index, Address offsets, std::int64_t count, std::int64_t segments,
                    int threads) {
  const SegmentIndex in{at_address<const std::int64_t>(index), count, segments};
  auto* const out = at_address<std::int64_t>(offsets);
  const auto groups = group_index(in, out, Grouping::sorted_only, threads);
  return {groups.bad, groups.unsorted};
}

std::int64_t first_n(Address rows, Address offsets, Address out, std::int64_t segments,
                     std::int64_t count, std::int64_t length, std::int64_t row_bytes, bool back,
                     int threads) {
  const FirstN job{at_address<const std::int64_t>(offsets), segments, count, length, row_bytes};
  return back ? return_first_n(job, at_address<const char>(rows), at_address<char>(out), threads)
              : take_first_n(job, at_address<const char>(rows), at_address<char>(out), threads);
}

std::int64_t row_ids(Address offsets, Address out, std::int64_t segments, std::int64_t rows,
                     int threads) {
  return write_row_ids(at_address<const std::int64_t>(offsets), segments, rows,
                       at_address<std::int64_t>(out), threads);
}

}  // namespace

void bind_segment_ops(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.def("segment_reduce", reduce, Released());
  m.def("segment_reduce_backward", spread, Released());
  m.def("segment_first_n", first_n, Released());
  m.def("segment_row_ids", row_ids, Released());
  m.def("segment_offsets", write_offsets, Released());
  m.def("index_reduce", index_reduce, Released());
  m.def("index_reduce_backward", index_spread, Released());
  m.def("fused_segment_sum", fused_reduce, Released());
  m.def("fused_segment_sum_backward", fused_spread, Released());
}

}  // namespace shoal
