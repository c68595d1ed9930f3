#include "bind.h"
#include "ops_segments.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// Segments of several tables; `parts` numbers each table's entries of `pooled` and `widths`. Only
// one table has an order, an index, or what its L2 norms need.
std::pair<std::int64_t, std::int64_t> run_segments(
    bool spread, int mode, bool is_double, int threads, const Addresses& values,
    const Addresses& offsets, const Sizes& segments, const Sizes& rows, const Addresses& pooled,
    const Sizes& widths, const Sizes& parts, Address order, Address index, Address inputs,
    Address norms) {
  std::vector<SegmentTable> tables(values.size());
  std::size_t next = 0;
  for (std::size_t k = 0; k < values.size(); ++k) {
    SegmentTable& t = tables[k];
    t.offsets = at<const std::int64_t>(offsets[k]);
    t.order = order_of(at<const std::int64_t>(order), rows[k]);
    t.index = at<const std::int64_t>(index);
    t.segments = segments[k];
    t.rows = rows[k];
    t.values = at<void>(values[k]);
    t.inputs = at<const void>(inputs);
    t.norms = at<const void>(norms);
    for (std::int64_t part = 0; part < parts[k]; ++part, ++next) {
      t.parts.push_back({at<void>(pooled[next]), widths[next]});
      t.dim += widths[next];
    }
  }
  const auto run = spread ? spread_segments : reduce_segments;
  const BadPlace bad = run(tables, static_cast<SegmentMode>(mode), is_double, threads);
  return {bad.table, bad.position};
}

}  // namespace

void bind_segment_ops(nb::module_& m) {
  m.def("segments", run_segments, Release());
  m.def("group_index", Wired<&group_index>::call, Release());
  m.def("first_n", Wired<&first_n>::call, Release());
  m.def("row_ids", Wired<&write_row_ids>::call, Release());
}

}  // namespace shoal
