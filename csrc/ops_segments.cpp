#include "ops_segments.h"

#include "threads.h"
#include "prefetch.h"
#include "segments_impl.h"

namespace shoal {
namespace {

// Segments [first, last) of a table and a range of its columns.
struct Task {
  std::size_t table;
  std::int64_t first, last;
  std::int64_t column, columns_end;
};

// A segment longer than `most` rows is shared by columns, whole cache lines each.
void add_tasks(std::vector<Task>& tasks, const SegmentTable& t, const Task& task,
               std::int64_t most, std::int64_t line, int threads) {
  const bool alone = task.last == task.first + 1 && t.parts.size() == 1;
  const std::int64_t work = alone ? t.offsets[task.last] - t.offsets[task.first] : 0;
  const std::int64_t shares = std::min<std::int64_t>(threads, t.dim / line);
  if (work <= most || shares < 2) {
    tasks.push_back(task);
    return;
  }
  const std::int64_t width = (t.dim / line + shares - 1) / shares * line;
  for (std::int64_t c = 0; c < t.dim; c += width) {
    tasks.push_back({task.table, task.first, task.last, c, std::min(c + width, t.dim)});
  }
}

std::vector<Task> plan(const std::vector<SegmentTable>& tables, bool is_double, int& threads) {
  const std::int64_t element = is_double ? 8 : 4;
  std::int64_t total = 0;
  for (const SegmentTable& t : tables) total += (t.rows + t.segments) * (t.dim * element + 8);
  threads = worth_threads(total, threads);
  const std::int64_t wanted = threads == 1 ? 1 : std::int64_t{4} * threads;
  std::vector<Task> tasks;
  for (std::size_t k = 0; k < tables.size(); ++k) {
    const SegmentTable& t = tables[k];
    if (t.segments == 0) continue;
    const std::int64_t work = t.rows + t.segments;
    const std::int64_t bytes = work * (t.dim * element + 8);
    const std::int64_t fair = std::max<std::int64_t>(bytes * wanted / total, 1);
    const std::int64_t cuts = std::min(fair, t.segments);
    std::int64_t first = 0;
    for (std::int64_t cut = 1; cut <= cuts; ++cut) {
      const std::int64_t reach = work / cuts * cut;
      const std::int64_t last =
          cut == cuts ? t.segments : std::max(first, segment_at(t.offsets, t.segments, reach));
      if (last == first) continue;
      add_tasks(tasks, t, {k, first, last, 0, t.dim}, 2 * (work / fair), 64 / element, threads);
      first = last;
    }
  }
  return tasks;
}

using Work = std::int64_t (*)(const SegmentTable&, const Task&, SegmentMode);

BadPlace run_tasks(const std::vector<SegmentTable>& tables, SegmentMode mode, bool is_double,
                   int threads, Work work) {
  for (std::size_t k = 0; k < tables.size(); ++k) {
    std::int64_t bad = -1;
    const SegmentTable& t = tables[k];
    if (!good_ends(t.offsets, t.segments, t.rows, bad)) {
      return {static_cast<std::int64_t>(k), bad};
    }
  }
  const std::vector<Task> tasks = plan(tables, is_double, threads);
  std::vector<std::int64_t> bad(tasks.size(), -1);
  Pool::instance().run(static_cast<std::int64_t>(tasks.size()), threads,
                       [&](std::int64_t i, int) {
                         const auto at = static_cast<std::size_t>(i);
                         bad[at] = work(tables[tasks[at].table], tasks[at], mode);
                       });
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (bad[i] >= 0) return {static_cast<std::int64_t>(tasks[i].table), bad[i]};
  }
  return {};
}

template <bool kRoot, class T, int n>
void finish(Lanes<T, n>& sum, T divisor) {
  if constexpr (kRoot) {
    sum.root();
  } else {
    sum.divide(divisor);
  }
}

// Adds the rows of a segment to zeros, a tile at a time; rows follow each other, or lie where the
// order says.
template <class T, bool kSquare, bool kOrdered>
void reduce_one(const SegmentTable& t, const Task& task, std::int64_t segment, T divisor, T* out,
                bool stream) {
  // Rows from this width on are read in an order of lanes that the hardware does not foresee: what
  // lies this far ahead is fetched a line at a time.
  constexpr std::int64_t kWideBytes = 512, kAheadBytes = 8192;
  const T* listed[kTile];
  const T* const* const rows = listed;
  const auto* values = static_cast<const T*>(t.values);
  const std::int64_t dim = t.dim, start = t.offsets[segment], stop = t.offsets[segment + 1];
  const bool wide = !kOrdered && dim * static_cast<std::int64_t>(sizeof(T)) >= kWideBytes;
  std::int64_t at = start;
  do {
    const std::int64_t count = std::min(kTile, stop - at);
    if constexpr (kOrdered) {
      for (std::int64_t r = 0; r < count; ++r) listed[r] = values + t.order[at + r] * dim;
    }
    const T* const first = values + at * dim;
    const bool fresh = at == start, last = at + count == stop, past = stream && fresh && last;
    const char* ahead = wide ? reinterpret_cast<const char*>(first) + kAheadBytes : nullptr;
    over_columns<T>(task.column, task.columns_end, fresh, [=, &ahead]<int n>(std::int64_t c) {
      Lanes<T, n> sum;
      if (fresh) {
        sum.zero();
      } else {
        sum.load(out + c);
      }
      const T* from = first + c;
      for (std::int64_t r = 0; r < count; ++r, from += dim) {
        if (n * sizeof(T) == 128 && ahead != nullptr) {
          __builtin_prefetch(ahead, 0, 3);
          __builtin_prefetch(ahead + 64, 0, 3);
          ahead += 128;
        }
        Lanes<T, n> x;
        x.load(kOrdered ? rows[r] + c : from);
        if constexpr (kSquare) x.multiply(x);
        sum.add(x);
      }
      if (last) finish<kSquare>(sum, divisor);
      sum.store(out + c, past);
    });
    at += count;
  } while (at < stop);
}

template <class Visit>
std::int64_t each_segment(const SegmentTable& t, const Task& task, const Visit& visit) {
  return each_segment(t.offsets, t.rows, task.first, task.last, visit);
}

template <class T>
void scatter_parts(const SegmentTable& t, std::int64_t segment, const T* row, bool stream) {
  for (const SegmentPart& part : t.parts) {
    copy_columns(pointer<T>(part.data) + segment * part.width, row, part.width, stream);
    row += part.width;
  }
}

// Together the parts are large; each must be whole vectors.
bool may_stream_parts(const SegmentTable& t, std::int64_t element) {
  bool stream = t.segments * t.dim * element >= kStreamBytes;
  for (const SegmentPart& part : t.parts) {
    stream = stream && may_stream(part.data, part.width * element, kStreamBytes);
  }
  return stream;
}

// Rows in another order than memory's are asked for long before they are read.
template <class T>
void prefetch_positions(const SegmentTable& t, std::int64_t& fetched, std::int64_t until) {
  constexpr std::int64_t kAhead = 32;
  const std::int64_t stop = std::min(until + kAhead, t.rows);
  for (; fetched < stop; ++fetched) {
    const char* row = static_cast<const char*>(t.values) +
                      t.order[fetched] * t.dim * static_cast<std::int64_t>(sizeof(T));
    prefetch_row(row, t.dim * static_cast<std::int64_t>(sizeof(T)));
  }
}

template <class T, bool kSquare, bool kOrdered>
std::int64_t reduce_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  const bool whole = t.parts.size() == 1;
  std::vector<T> parted(whole ? 0 : static_cast<std::size_t>(t.dim));
  const bool stream = may_stream_parts(t, sizeof(T));
  T* const outs = pointer<T>(t.parts[0].data);
  T* const scratch = parted.data();
  const auto* const values = static_cast<const T*>(t.values);
  const std::int64_t dim = t.dim;
  std::int64_t bad = -1;
  // Narrow rows, where a loop of its own for each width pays.
  const bool narrow = !kOrdered && as_one<T>(dim, [=, &t, &task, &bad]<int n>() {
    bad = each_segment(t, task, [=, &t](auto segment, auto start, auto stop) {
      const T* const end = values + stop * dim;
      Lanes<T, n> sum;
      sum.zero();
      for (const T* x = values + start * dim; x < end; x += dim) {
        Lanes<T, n> row;
        row.load_row(x, dim);
        if constexpr (kSquare) row.multiply(row);
        sum.add(row);
      }
      finish<kSquare>(sum, divisor_of<T>(mode, stop - start));
      sum.store_row(whole ? outs + segment * dim : scratch, dim, whole && stream);
      if (!whole) scatter_parts(t, segment, scratch, stream);
    });
  });
  if (!narrow) {
    std::int64_t fetched = std::clamp<std::int64_t>(t.offsets[task.first], 0, t.rows);
    bad = each_segment(t, task, [&](auto segment, auto start, auto stop) {
      if constexpr (kOrdered) prefetch_positions<T>(t, fetched, stop);
      T* const out = whole ? outs + segment * dim : scratch;
      reduce_one<T, kSquare, kOrdered>(t, task, segment, divisor_of<T>(mode, stop - start), out,
                                       stream && whole);
      if (!whole) scatter_parts(t, segment, out, stream);
    });
  }
  end_stream(stream);
  return bad;
}

template <class T>
std::int64_t spread_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  std::vector<T> room(static_cast<std::size_t>(t.dim));
  T* const scratch = room.data();
  T* const values = pointer<T>(t.values);
  const std::int64_t dim = t.dim, row_bytes = dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(values, row_bytes, t.rows);
  std::int64_t bad = -1;
  const bool narrow = mode != SegmentMode::l2 && as_one<T>(dim, [=, &t, &task, &bad]<int n>() {
    bad = each_segment(t, task, [=, &t](auto segment, auto start, auto stop) {
      Lanes<T, n> row;
      row.load_row(gradient_row<T>(t, segment, scratch), dim);
      row.divide(divisor_of<T>(mode, stop - start));
      T* const end = values + stop * dim;
      for (T* out = values + start * dim; out < end; out += dim) row.store_row(out, dim, stream);
    });
  });
  const bool whole_lines =
      row_bytes % 128 == 0 && reinterpret_cast<std::uintptr_t>(values) % 64 == 0;
  const auto one = [&](auto segment, auto start, auto stop) {
    if (start == stop) return;
    const T* row = gradient_row<T>(t, segment, scratch);
    const T divisor = divisor_of<T>(mode, stop - start);
    const std::int64_t count = stop - start;
    if (whole_lines && t.inputs == nullptr && count <= kTile) {
      // Lanes in all rows: divided once, while the stores of those before are under way.
      T* const out = values + start * dim;
      over_columns<T>(task.column, task.columns_end, true, [=]<int n>(std::int64_t c) {
        Lanes<T, n> value;
        value.load(row + c);
        value.divide(divisor);
        T* to = out + c;
        for (std::int64_t r = 0; r < count; ++r, to += dim) value.store(to, stream);
      });
      return;
    }
    if (divisor != T(1)) {
      for (std::int64_t c = 0; c < dim; ++c) scratch[c] = row[c] / divisor;
      row = scratch;
    }
    spread_rows<T>(t, row, T(1), start, count, task.column, task.columns_end, stream);
  };
  if (!narrow) bad = each_segment(t, task, one);
  end_stream(stream);
  return bad;
}

template <class T>
std::int64_t reduce_rows(const SegmentTable& t, const Task& task, SegmentMode mode) {
  if (mode == SegmentMode::l2) {
    return t.order != nullptr ? reduce_task<T, true, true>(t, task, mode)
                              : reduce_task<T, true, false>(t, task, mode);
  }
  return t.order != nullptr ? reduce_task<T, false, true>(t, task, mode)
                            : reduce_task<T, false, false>(t, task, mode);
}

}  // namespace

BadPlace reduce_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads) {
  return run_tasks(tables, mode, is_double, threads,
                   is_double ? reduce_rows<double> : reduce_rows<float>);
}

BadPlace spread_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads) {
  const SegmentTable& only = tables[0];
  // A copy of a row is as fast from anywhere. What is worked out once a segment is faster by
  // offsets, where rows lie in order.
  if (only.index != nullptr && (mode == SegmentMode::sum || only.order != nullptr)) {
    const std::int64_t bad = spread_by_index(only, mode, is_double, threads);
    return {bad < 0 ? -1 : 0, bad};
  }
  return run_tasks(tables, mode, is_double, threads,
                   is_double ? spread_task<double> : spread_task<float>);
}

}  // namespace shoal
