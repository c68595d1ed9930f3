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
      const std::int64_t last = cut == cuts ? t.segments : std::max(first, segment_at(t, reach));
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

template <class T, bool kSquare, bool kOrdered>
void reduce_one(const SegmentTable& t, const Task& task, std::int64_t segment,
                const Finish<T>& finish, T* out, bool stream) {
  const T* rows[kTile];
  const auto* values = static_cast<const T*>(t.values);
  std::int64_t at = t.offsets[segment];
  const std::int64_t start = at;
  const std::int64_t stop = t.offsets[segment + 1];
  do {
    const std::int64_t count = std::min(kTile, stop - at);
    if constexpr (kOrdered) {
      for (std::int64_t r = 0; r < count; ++r) rows[r] = values + t.order[at + r] * t.dim;
    }
    const bool last = at + count == stop;
    const T* first = values + at * t.dim;
    const bool wide = !kOrdered && t.dim * static_cast<std::int64_t>(sizeof(T)) >= kWideBytes;
    const ReduceTile<T, kSquare, kOrdered> tile{
        first,
        rows,
        t.dim,
        count,
        at == start,
        last ? &finish : nullptr,
        out,
        stream && last && at == start,
        wide ? reinterpret_cast<const char*>(first) + kAheadBytes : nullptr};
    for_blocks<T>(task.column, task.columns_end, at == start, tile);
    at += count;
  } while (at < stop);
}

template <class T>
struct CopyBlock {
  const T* from;
  T* to;
  bool stream;
  template <int n>
  void operator()(std::int64_t c) const {
    Block<T, n> block;
    block.load(from + c);
    block.store(to + c, stream);
  }
};

template <class T>
void scatter_parts(const SegmentTable& t, std::int64_t segment, const T* row, bool stream) {
  for (const SegmentPart& part : t.parts) {
    const CopyBlock<T> copy{row, pointer<T>(part.data) + segment * part.width, stream};
    for_blocks<T>(0, part.width, true, copy);
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

// Narrow rows, where a loop of its own for each width pays. `bad` is the first bad offset.
template <class T, bool kSquare>
struct ReduceNarrow {
  const SegmentTable& t;
  const Task& task;
  SegmentMode mode;
  T* scratch;  // a row, when there are several parts
  bool stream;
  std::int64_t& bad;

  template <int n>
  void operator()() const {
    const auto* values = static_cast<const T*>(t.values);
    T* out = pointer<T>(t.parts[0].data);
    for (std::int64_t segment = task.first; segment < task.last; ++segment) {
      if (!inside(t.offsets, segment, t.rows)) {
        bad = segment + 1;
        return;
      }
      const T* x = values + t.offsets[segment] * t.dim;
      const T* const stop = values + t.offsets[segment + 1] * t.dim;
      const std::int64_t count = t.offsets[segment + 1] - t.offsets[segment];
      Block<T, n> sum;
      sum.zero();
      for (; x < stop; x += t.dim) {
        Block<T, n> row;
        row.load_row(x, t.dim);
        if constexpr (kSquare) row.multiply(row);
        sum.add(row);
      }
      Finish<T>{divisor_of<T>(mode, count), kSquare}.apply(sum);
      if (scratch == nullptr) {
        sum.store_row(out + segment * t.dim, t.dim, stream);
      } else {
        sum.store_row(scratch, t.dim, false);
        scatter_parts(t, segment, scratch, stream);
      }
    }
  }
};

template <class T, bool kSquare, bool kOrdered>
std::int64_t reduce_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  const bool whole = t.parts.size() == 1;
  std::vector<T> scratch(whole ? 0 : static_cast<std::size_t>(t.dim));
  const bool stream = may_stream_parts(t, sizeof(T));
  std::int64_t bad = -1;
  const ReduceNarrow<T, kSquare> narrow{t,      task, mode, whole ? nullptr : scratch.data(),
                                        stream, bad};
  if (!kOrdered && as_one_block<T>(t.dim, narrow)) {
    end_stream(stream);
    return bad;
  }
  std::int64_t fetched = inside(t.offsets, task.first, t.rows) ? t.offsets[task.first] : t.rows;
  for (std::int64_t segment = task.first; segment < task.last; ++segment) {
    if (!inside(t.offsets, segment, t.rows)) return segment + 1;
    const std::int64_t stop = t.offsets[segment + 1];
    if constexpr (kOrdered) prefetch_positions<T>(t, fetched, stop);
    T* out = whole ? pointer<T>(t.parts[0].data) + segment * t.dim : scratch.data();
    const Finish<T> finish{divisor_of<T>(mode, stop - t.offsets[segment]), kSquare};
    reduce_one<T, kSquare, kOrdered>(t, task, segment, finish, out, stream && whole);
    if (!whole) scatter_parts(t, segment, out, stream);
  }
  end_stream(stream);
  return -1;
}

template <class T>
struct SpreadNarrow {
  const SegmentTable& t;
  const Task& task;
  SegmentMode mode;
  T* scratch;  // a row
  bool stream;
  std::int64_t& bad;

  template <int n>
  void operator()() const {
    T* const values = pointer<T>(t.values);
    for (std::int64_t segment = task.first; segment < task.last; ++segment) {
      if (!inside(t.offsets, segment, t.rows)) {
        bad = segment + 1;
        return;
      }
      T* out = values + t.offsets[segment] * t.dim;
      T* const stop = values + t.offsets[segment + 1] * t.dim;
      const std::int64_t count = t.offsets[segment + 1] - t.offsets[segment];
      Block<T, n> row;
      row.load_row(gradient_row<T>(t, segment, scratch), t.dim);
      Finish<T>{divisor_of<T>(mode, count), false}.apply(row);
      for (; out < stop; out += t.dim) row.store_row(out, t.dim, stream);
    }
  }
};

// A block of columns in all rows of a segment: it is divided once, while the stores of the block
// before are under way.
template <class T>
struct SpreadBlock {
  const T* row;
  T* out;
  T divisor;
  std::int64_t dim, count;
  bool stream;

  template <int n>
  void operator()(std::int64_t c) const {
    Block<T, n> value;
    value.load(row + c);
    if (divisor != T(1)) value.divide(divisor);
    T* to = out + c;
    for (std::int64_t r = 0; r < count; ++r, to += dim) value.store(to, stream);
  }
};

template <class T>
std::int64_t spread_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  std::vector<T> scratch(static_cast<std::size_t>(t.dim));
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(t.values, row_bytes, t.rows);
  std::int64_t bad = -1;
  const SpreadNarrow<T> narrow{t, task, mode, scratch.data(), stream, bad};
  if (mode != SegmentMode::l2 && as_one_block<T>(t.dim, narrow)) {
    end_stream(stream);
    return bad;
  }
  const bool whole_lines =
      row_bytes % 128 == 0 && reinterpret_cast<std::uintptr_t>(t.values) % 64 == 0;
  for (std::int64_t segment = task.first; segment < task.last; ++segment) {
    if (!inside(t.offsets, segment, t.rows)) return segment + 1;
    const std::int64_t start = t.offsets[segment];
    const std::int64_t stop = t.offsets[segment + 1];
    if (start == stop) continue;
    const T* row = gradient_row<T>(t, segment, scratch.data());
    const T divisor = divisor_of<T>(mode, stop - start);
    if (whole_lines && t.inputs == nullptr && stop - start <= kTile) {
      T* out = pointer<T>(t.values) + start * t.dim;
      for_blocks<T>(task.column, task.columns_end, true,
                    SpreadBlock<T>{row, out, divisor, t.dim, stop - start, stream});
      continue;
    }
    if (divisor != T(1)) {
      T* const to = scratch.data();
      for (std::int64_t c = 0; c < t.dim; ++c) to[c] = row[c] / divisor;
      row = to;
    }
    spread_rows<T>(t, row, T(1), start, stop - start, task.column, task.columns_end, stream);
  }
  end_stream(stream);
  return -1;
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
