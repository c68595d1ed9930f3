#pragma once
// Probing and reading. Included by kernels_isa.cpp only. Each loop runs a rolling window: touch the
// index line, later the row, later copy it, so that memory latency overlaps.
#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "ops_copy.h"
#include "prefetch.h"
#include "rows_impl.h"
#include "stream.h"

namespace shoal {
namespace {

constexpr std::int64_t kWindow = 64;  // ids under way; a power of two
constexpr std::size_t kWideBytes = 4096;

inline std::uint64_t hash_in(const IndexView& v, std::int64_t id) {
  return hash_of(id, v.salt);
}

__attribute__((always_inline)) inline const Line* touch_line(const IndexView& v, std::int64_t id) {
  const StripeView* stripe = nullptr;
  const Line* line = home_line(v, hash_in(v, id), stripe);
  __builtin_prefetch(line, 0, 2);
  return line;
}

inline std::int32_t row_of(const IndexView& v, std::int64_t id) {
  const StripeView* stripe = nullptr;
  const Line* line = home_line(v, hash_in(v, id), stripe);
  return probe(stripe, line, id);
}

// The same, its home line at hand; what overflowed past that line is rare.
inline std::int32_t row_of(const IndexView& v, const Line* line, std::int64_t id) {
  const unsigned hit = match(line, id);
  if (__builtin_expect(hit != 0, 1)) return line->rows[__builtin_ctz(hit)];
  if (__builtin_expect((line->meta >> 8) == 0, 1)) return kNoRow;
  return row_of(v, id);
}

void probe_ids(const IndexView& index, const std::int64_t* ids, std::int64_t n,
               std::int32_t* rows, std::int64_t* absent) {
  const Line* lines[kWindow];
  std::int64_t overflowed[kWindow], waiting = 0;
  const IndexView v = index;
  const std::int64_t first = n < kWindow ? n : kWindow;
  for (std::int64_t i = 0; i < first; ++i) lines[i] = touch_line(v, ids[i]);
  const auto settle = [&](std::int64_t i, std::int32_t row) {
    if (absent != nullptr && row == kNoRow) row = row_of(v, absent[i] = read_once(ids + i));
    rows[i] = row;
  };
  const auto settle_overflowed = [&] {
    for (; waiting > 0; --waiting) {
      const std::int64_t i = overflowed[waiting - 1];
      settle(i, row_of(v, ids[i]));
    }
  };
  const auto look = [&](std::int64_t i, const Line* line) {
    const unsigned hit = match(line, ids[i]);
    if (hit != 0) {
      rows[i] = line->rows[__builtin_ctz(hit)];
    } else if ((line->meta >> 8) == 0) {
      settle(i, kNoRow);
    } else {
      // The line after it is asked for as well, and looked at when some time has passed.
      __builtin_prefetch(line + 1, 0, 2);
      overflowed[waiting++] = i;
      if (waiting == kWindow) settle_overflowed();
    }
  };
  std::int64_t i = 0;
  for (; i + kWindow < n; ++i) {
    const Line* const line = lines[i % kWindow];
    lines[i % kWindow] = touch_line(v, ids[i + kWindow]);
    look(i, line);
  }
  for (; i < n; ++i) look(i, lines[i % kWindow]);
  settle_overflowed();
}

template <bool kStream, class Width>
std::int64_t find_copy_of(const IndexView v, const RowView r, const std::int64_t* ids,
                          std::int64_t n, Width bytes, char* out, std::uint8_t* found) {
  const Line* lines[kWindow];
  const char* sources[kWindow];
  std::int64_t missing = 0;
  const auto locate = [&](std::int64_t i) {
    const std::int32_t row = row_of(v, lines[i % kWindow], ids[i]);
    const char* source =
        row == kNoRow ? nullptr : weight_row(r, static_cast<std::uint32_t>(row));
    if (source != nullptr) prefetch_row(source, bytes);
    sources[i % kWindow] = source;
  };
  const auto copy = [&](std::int64_t i) {
    const char* const source = sources[i % kWindow];
    char* to = out + static_cast<std::size_t>(i) * bytes;
    found[i] = source != nullptr;
    if (__builtin_expect(source != nullptr, 1)) {
      if constexpr (kStream) {
        stream_bytes(to, source, bytes);
      } else {
        __builtin_memcpy(to, source, bytes);
      }
    } else {
      __builtin_memset(to, 0, bytes);
      ++missing;
    }
  };
  // Step i: copy of i - 2 kWindow, row of i - kWindow, line of i.
  std::int64_t i = 0;
  for (; i < 2 * kWindow && i < n; ++i) {
    if (i >= kWindow) locate(i - kWindow);
    lines[i % kWindow] = touch_line(v, ids[i]);
  }
  for (; i < n; ++i) {
    copy(i - 2 * kWindow);
    locate(i - kWindow);
    lines[i % kWindow] = touch_line(v, ids[i]);
  }
  for (; i < n + 2 * kWindow; ++i) {
    if (i >= 2 * kWindow) copy(i - 2 * kWindow);
    if (i >= kWindow && i < n + kWindow) locate(i - kWindow);
  }
  return missing;
}

std::int64_t find_copy(const IndexView& index, const RowView& rows, const std::int64_t* ids,
                       std::int64_t n, char* out, std::uint8_t* found, bool large) {
  const std::size_t bytes = weight_bytes(rows);
  if (large && bytes >= 128 && streamable(out, bytes)) {
    const std::int64_t missing = with_bytes(bytes, [&](auto width) {
      return find_copy_of<true>(index, rows, ids, n, width, out, found);
    });
    end_stream();
    return missing;
  }
  return with_bytes(bytes, [&](auto width) {
    return find_copy_of<false>(index, rows, ids, n, width, out, found);
  });
}

template <class T>
inline void read_row(const TableView& t, std::uint32_t row, std::int64_t global_step, T* out) {
  load_weights(t.rows.dtype, weight_row(t.rows, row), out, t.rows.dim);
  for (int k = 0; k < t.n_segments; ++k) retrieve(t.segments[k], global_step, out);
}

inline void read_initial(const TableView& t, std::int64_t id, float* out) {
  initial_row(RowMaker{t.segments, t.n_segments, t.key, t.first_column}, id, out);
  if (t.rows.dtype == DType::f16) {
    for (int i = 0; i < t.rows.dim; ++i) out[i] = half_to_float(float_to_half(out[i]));
  } else if (t.rows.dtype == DType::bf16) {
    for (int i = 0; i < t.rows.dim; ++i) out[i] = bf16_to_float(float_to_bf16(out[i]));
  } else if (t.rows.dtype == DType::i8) {
    const float scale = int8_scale(out, t.rows.dim);
    for (int i = 0; i < t.rows.dim; ++i) out[i] = int8_code(out[i], scale) * scale;
  }
}
inline void read_initial(const TableView& t, std::int64_t id, double* out) {
  float* narrow = reinterpret_cast<float*>(out + t.rows.dim);
  initial_row(RowMaker{t.segments, t.n_segments, t.key, t.first_column}, id, narrow);
  for (int i = 0; i < t.rows.dim; ++i) out[i] = narrow[i];
}

// The row at `position`, through the retriever; nullptr reads as zeros. `temp` holds 2D elements.
template <class T>
inline const T* row_at(const GatherJob& job, std::int64_t position, T* temp) {
  const std::int32_t row = job.rows[position];
  if (row >= 0) {
    if (job.table.plain) {
      return reinterpret_cast<const T*>(
          weight_row(job.table.rows, static_cast<std::uint32_t>(row)));
    }
    read_row(job.table, static_cast<std::uint32_t>(row), job.global_step, temp);
    return temp;
  }
  if (job.absent_is_zero) return nullptr;
  read_initial(job.table, job.ids[position], temp);
  for (int k = 0; k < job.table.n_segments; ++k) {
    retrieve(job.table.segments[k], job.global_step, temp);
  }
  return temp;
}

template <class T>
inline void write_columns(T* to, const T* from, std::int64_t n, T factor, bool add) {
  if (from == nullptr) {
    if (!add) {
      for (std::int64_t i = 0; i < n; ++i) to[i] = 0;
    }
  } else if (add) {
    for (std::int64_t i = 0; i < n; ++i) to[i] += from[i] * factor;
  } else if (factor == T(1)) {
    copy_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
               static_cast<std::size_t>(n) * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] * factor;
  }
}

template <class T>
inline T* output_at(const GatherJob& job, const PlanSlice& s, std::int64_t bag) {
  return static_cast<T*>(job.outputs[s.output]) + bag * s.stride + s.place;
}

template <class T>
void gather_first_n(const GatherJob& job, std::int64_t bag, std::int64_t start, std::int64_t stop,
                    T* temp) {
  for (std::int64_t j = 0; j < job.pool.length; ++j) {
    const std::int64_t position = start + j;
    const bool inside = position < stop;
    const T* row = inside ? row_at(job, position, temp) : nullptr;
    const T factor = inside && job.weights != nullptr ? static_cast<T>(job.weights[position]) : T(1);
    for (std::int64_t k = 0; k < job.pool.n_slices; ++k) {
      const PlanSlice& s = job.pool.slices[k];
      write_columns(output_at<T>(job, s, bag) + j * s.step,
                    row == nullptr ? nullptr : row + s.start, s.width, factor, s.adds());
    }
  }
}

template <class T>
void gather_bag(const GatherJob& job, std::int64_t bag, std::int64_t start, std::int64_t stop,
                T* temp) {
  const T bag_factor = (job.pool.pooling & ~kByRow) == kMean && stop - start > 1
                           ? T(1) / static_cast<T>(stop - start)
                           : T(1);
  for (std::int64_t k = 0; start == stop && k < job.pool.n_slices; ++k) {
    const PlanSlice& s = job.pool.slices[k];
    write_columns<T>(output_at<T>(job, s, bag), nullptr, s.width, 1, s.adds());
  }
  for (std::int64_t position = start; position < stop; ++position) {
    const T* row = row_at(job, position, temp);
    const T factor = job.weights == nullptr
                         ? bag_factor
                         : bag_factor * static_cast<T>(job.weights[position]);
    for (std::int64_t k = 0; k < job.pool.n_slices; ++k) {
      const PlanSlice& s = job.pool.slices[k];
      write_columns(output_at<T>(job, s, bag), row == nullptr ? nullptr : row + s.start, s.width,
                    factor, s.adds() || position > start);
    }
  }
}

// One id a bag, whole rows as stored, one slice: the copy that most features are.
template <class T>
inline bool single_copy(const GatherJob& job) {
  return job.table.plain && job.weights == nullptr && job.pool.pooling != kFirstN &&
         job.pool.n_slices == 1 && !job.pool.slices[0].adds();
}

// Bags [start, stop) of one present row each, from `position` on; returns how many of them it
// copied before one was not that.
template <class T>
std::int64_t copy_single(const GatherJob& job, std::int64_t start, std::int64_t stop,
                         std::int64_t position) {
  const char* sources[kWindow];
  const RowView v = job.table.rows;
  const PlanSlice slice = job.pool.slices[0];
  const std::int32_t* rows = job.rows + position;
  const std::size_t width = static_cast<std::size_t>(slice.width) * sizeof(T);
  const std::size_t skip = static_cast<std::size_t>(slice.start) * sizeof(T);
  const std::size_t stride = static_cast<std::size_t>(slice.stride) * sizeof(T);
  char* to = reinterpret_cast<char*>(output_at<T>(job, slice, start));
  const std::int64_t* offsets = job.offsets == nullptr ? nullptr : job.offsets + start;
  const std::int64_t most = std::min(stop - start, job.stop - position);
  std::int64_t n = 0;
  while (n < most && (offsets == nullptr || offsets[n + 1] - position == n + 1) &&
         rows[n] >= 0) {
    ++n;
  }
  const auto touch = [&](std::int64_t i) {
    const char* source = weight_row(v, static_cast<std::uint32_t>(rows[i])) + skip;
    prefetch_row(source, width);
    sources[i % kWindow] = source;
  };
  for (std::int64_t i = 0; i < n && i < kWindow; ++i) touch(i);
  const auto copy = [&](auto stream) {
    with_bytes(width, [&](auto bytes) {
      for (std::int64_t i = 0; i < n; ++i) {
        const char* const source = sources[i % kWindow];
        if (i + kWindow < n) touch(i + kWindow);
        if constexpr (stream) {
          stream_bytes(to, source, bytes);
        } else {
          __builtin_memcpy(to, source, bytes);
        }
        to += stride;
      }
    });
  };
  // Bags of a wide output lie pages apart: their lines share few cache sets and push each other out.
  if (stride >= kWideBytes && streamable(to, width | stride)) {
    copy(std::true_type{});
    end_stream();
  } else {
    copy(std::false_type{});
  }
  return n;
}

template <class T>
void gather_bags(const GatherJob& job, std::int64_t bag_start, std::int64_t bag_stop, T* temp) {
  const auto start_of = [&](std::int64_t bag) {
    if (job.offsets == nullptr) return job.first + bag;
    return std::clamp(read_once(job.offsets + bag), job.first, job.stop);
  };
  if (bag_start < bag_stop && single_copy<T>(job)) {
    bag_start += copy_single<T>(job, bag_start, bag_stop, start_of(bag_start));
  }
  const std::size_t bytes = weight_bytes(job.table.rows);
  const std::int64_t last = start_of(bag_stop);
  std::int64_t fetched = start_of(bag_start);
  for (std::int64_t bag = bag_start; bag < bag_stop; ++bag) {
    const std::int64_t start = start_of(bag);
    const std::int64_t stop = std::max(start, start_of(bag + 1));
    const std::int64_t ahead = stop + kWindow < last ? stop + kWindow : last;
    for (; fetched < ahead; ++fetched) {
      const std::int32_t row = job.rows[fetched];
      if (row >= 0) {
        prefetch_row(weight_row(job.table.rows, static_cast<std::uint32_t>(row)), bytes);
      }
    }
    if (job.pool.pooling == kFirstN) {
      gather_first_n(job, bag, start, stop, temp);
    } else {
      gather_bag(job, bag, start, stop, temp);
    }
  }
}

void gather(const GatherJob& job, std::int64_t bag_start, std::int64_t bag_stop, void* scratch) {
  if (job.table.rows.dtype == DType::f64) {
    gather_bags(job, bag_start, bag_stop, static_cast<double*>(scratch));
  } else {
    gather_bags(job, bag_start, bag_stop, static_cast<float*>(scratch));
  }
}

}  // namespace
}  // namespace shoal
