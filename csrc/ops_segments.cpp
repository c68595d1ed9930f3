#include "ops_segments.h"

#include <span>

#include "pool.h"
#include "segments_impl.h"

namespace shoal {
namespace {

// Segments [first, last) of a table and a range of its columns.
struct Task {
  std::size_t table;
  std::int64_t first, last;
  std::int64_t column, columns_end;
};

// First segment at which rows plus segments before it reach `work`.
std::int64_t segment_at(const SegmentTable& t, std::int64_t work) {
  std::int64_t low = 0;
  std::int64_t high = t.segments;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (t.offsets[middle] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

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

bool good_ends(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
               std::int64_t& bad) {
  bad = offsets[0] != 0 ? 0 : offsets[segments] != rows ? segments : -1;
  return bad < 0;
}

bool inside(const std::int64_t* offsets, std::int64_t segment, std::int64_t rows) {
  const std::int64_t start = offsets[segment];
  const std::int64_t stop = offsets[segment + 1];
  return 0 <= start && start <= stop && stop <= rows;
}

template <class Body>
BadPlace run_tasks(const std::vector<SegmentTable>& tables, bool is_double, int threads,
                   const Body& body) {
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
                         bad[at] = body(tables[tasks[at].table], tasks[at]);
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
    for_blocks<T>(task.column, task.columns_end, tile);
    at += count;
  } while (at < stop);
}

template <class T>
void scatter_parts(const SegmentTable& t, std::int64_t segment, const T* row) {
  for (const SegmentPart& part : t.parts) {
    std::memcpy(pointer<T>(part.data) + segment * part.width, row,
                static_cast<std::size_t>(part.width) * sizeof(T));
    row += part.width;
  }
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
      sum.store_row(out + segment * t.dim, t.dim, stream);
    }
  }
};

template <class T, bool kSquare, bool kOrdered>
std::int64_t reduce_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  const bool whole = t.parts.size() == 1;
  std::vector<T> scratch(whole ? 0 : static_cast<std::size_t>(t.dim));
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = whole && may_stream(t.parts[0].data, row_bytes, t.segments);
  std::int64_t bad = -1;
  const ReduceNarrow<T, kSquare> narrow{t, task, mode, stream, bad};
  if (!kOrdered && whole && as_one_block<T>(t.dim, narrow)) {
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
    reduce_one<T, kSquare, kOrdered>(t, task, segment, finish, out, stream);
    if (!whole) scatter_parts(t, segment, out);
  }
  end_stream(stream);
  return -1;
}

template <class T>
struct SpreadNarrow {
  const SegmentTable& t;
  const Task& task;
  SegmentMode mode;
  bool stream;
  std::int64_t& bad;

  template <int n>
  void operator()() const {
    const T* grads = pointer<T>(t.parts[0].data);
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
      row.load_row(grads + segment * t.dim, t.dim);
      Finish<T>{divisor_of<T>(mode, count), false}.apply(row);
      for (; out < stop; out += t.dim) row.store_row(out, t.dim, stream);
    }
  }
};

template <class T>
std::int64_t spread_task(const SegmentTable& t, const Task& task, SegmentMode mode) {
  std::vector<T> scratch(static_cast<std::size_t>(t.dim));
  const std::int64_t row_bytes = t.dim * static_cast<std::int64_t>(sizeof(T));
  const bool stream = may_stream(t.values, row_bytes, t.rows);
  std::int64_t bad = -1;
  const SpreadNarrow<T> narrow{t, task, mode, stream, bad};
  const bool plain = t.parts.size() == 1 && mode != SegmentMode::l2;
  if (plain && as_one_block<T>(t.dim, narrow)) {
    end_stream(stream);
    return bad;
  }
  for (std::int64_t segment = task.first; segment < task.last; ++segment) {
    if (!inside(t.offsets, segment, t.rows)) return segment + 1;
    const std::int64_t start = t.offsets[segment];
    const std::int64_t stop = t.offsets[segment + 1];
    if (start == stop) continue;
    const T* row = gradient_row<T>(t, segment, mode, stop - start, scratch.data());
    spread_rows<T>(t, row, start, stop - start, task.column, task.columns_end, stream);
  }
  end_stream(stream);
  return -1;
}

template <class T, bool kSquare>
std::int64_t reduce_rows(const SegmentTable& t, const Task& task, SegmentMode mode) {
  return t.order != nullptr ? reduce_task<T, kSquare, true>(t, task, mode)
                            : reduce_task<T, kSquare, false>(t, task, mode);
}

template <class T>
BadPlace reduce_typed(const std::vector<SegmentTable>& tables, SegmentMode mode, int threads) {
  return run_tasks(tables, sizeof(T) == 8, threads,
                   [mode](const SegmentTable& t, const Task& task) {
                     return mode == SegmentMode::l2 ? reduce_rows<T, true>(t, task, mode)
                                                    : reduce_rows<T, false>(t, task, mode);
                   });
}

template <class T>
BadPlace spread_typed(const std::vector<SegmentTable>& tables, SegmentMode mode, int threads) {
  return run_tasks(tables, sizeof(T) == 8, threads,
                   [mode](const SegmentTable& t, const Task& task) {
                     return spread_task<T>(t, task, mode);
                   });
}

// Runs body(first, last) over segments in even parts; first bad offset or -1.
template <class Body>
std::int64_t over_segments(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
                           std::int64_t bytes, int threads, const Body& body) {
  std::int64_t bad_end = -1;
  if (!good_ends(offsets, segments, rows, bad_end)) return bad_end;
  SegmentTable table;
  table.offsets = offsets;
  table.segments = segments;
  table.rows = rows;
  const int lanes = worth_threads(bytes, threads);
  const std::int64_t cuts = std::min<std::int64_t>(lanes == 1 ? 1 : lanes * 4, segments);
  std::vector<std::int64_t> edges(static_cast<std::size_t>(cuts) + 1, 0);
  for (std::int64_t cut = 1; cut <= cuts; ++cut) {
    const auto i = static_cast<std::size_t>(cut);
    edges[i] = cut == cuts ? segments
                           : std::max(edges[i - 1], segment_at(table, (rows + segments) / cuts * cut));
  }
  std::vector<std::int64_t> bad(static_cast<std::size_t>(cuts), -1);
  Pool::instance().run(cuts, lanes, [&](std::int64_t i, int) {
    const auto at = static_cast<std::size_t>(i);
    for (std::int64_t b = edges[at]; b < edges[at + 1]; ++b) {
      if (!inside(offsets, b, rows)) {
        bad[at] = b + 1;
        return;
      }
      body(b, offsets[b], offsets[b + 1]);
    }
  });
  for (const std::int64_t place : bad) {
    if (place >= 0) return place;
  }
  return -1;
}

}  // namespace

BadPlace reduce_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads) {
  return is_double ? reduce_typed<double>(tables, mode, threads)
                   : reduce_typed<float>(tables, mode, threads);
}

BadPlace spread_segments(const std::vector<SegmentTable>& tables, SegmentMode mode,
                         bool is_double, int threads) {
  return is_double ? spread_typed<double>(tables, mode, threads)
                   : spread_typed<float>(tables, mode, threads);
}

std::int64_t take_first_n(const FirstN& job, const char* rows, char* out, int threads) {
  const std::int64_t bytes = (job.rows + job.segments * job.length) * job.row_bytes;
  return over_segments(job.offsets, job.segments, job.rows, bytes, threads,
                       [&](std::int64_t b, std::int64_t start, std::int64_t stop) {
                         const std::int64_t kept = std::min(stop - start, job.length);
                         char* to = out + b * job.length * job.row_bytes;
                         const std::int64_t filled = kept * job.row_bytes;
                         const std::int64_t all = job.length * job.row_bytes;
                         std::memcpy(to, rows + start * job.row_bytes,
                                     static_cast<std::size_t>(filled));
                         std::memset(to + filled, 0, static_cast<std::size_t>(all - filled));
                       });
}

std::int64_t return_first_n(const FirstN& job, const char* grads, char* out, int threads) {
  const std::int64_t bytes = 2 * job.rows * job.row_bytes;
  return over_segments(job.offsets, job.segments, job.rows, bytes, threads,
                       [&](std::int64_t b, std::int64_t start, std::int64_t stop) {
                         const std::int64_t kept = std::min(stop - start, job.length);
                         char* to = out + start * job.row_bytes;
                         const std::int64_t filled = kept * job.row_bytes;
                         const std::int64_t all = (stop - start) * job.row_bytes;
                         std::memcpy(to, grads + b * job.length * job.row_bytes,
                                     static_cast<std::size_t>(filled));
                         std::memset(to + filled, 0, static_cast<std::size_t>(all - filled));
                       });
}

std::int64_t write_row_ids(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
                           std::int64_t* out, int threads) {
  return over_segments(offsets, segments, rows, (rows + segments) * 8, threads,
                       [out](std::int64_t b, std::int64_t start, std::int64_t stop) {
                         for (std::int64_t r = start; r < stop; ++r) out[r] = b;
                       });
}

}  // namespace shoal
