#pragma once
// Probing and reading. Included by kernels_isa.cpp only. Each loop runs a rolling window: touch the
// index line, later the row, later copy it, so that memory latency overlaps.
#include "kernels.h"
#include "rows_impl.h"

namespace shoal {
namespace {

constexpr std::int64_t kWindow = 32;

// Into the second level: many rows are under way at once, and the first level tracks few misses.
// Forced inline: see apply_impl.h.
__attribute__((always_inline)) inline void prefetch_bytes(const char* p, std::size_t bytes) {
  const std::size_t limit = bytes < 512 ? bytes : 512;
  for (std::size_t at = 0; at < limit; at += 64) __builtin_prefetch(p + at, 0, 2);
}

void probe_ids(const IndexView& index, const std::int64_t* ids, std::int64_t n,
               std::int32_t* rows) {
  const StripeView* stripes[kWindow];
  const Line* lines[kWindow];
  const IndexView v = index;
  for (std::int64_t i = 0; i < n + kWindow; ++i) {
    const std::int64_t slot = i & (kWindow - 1);
    if (i >= kWindow) rows[i - kWindow] = probe(stripes[slot], lines[slot], ids[i - kWindow]);
    if (i < n) {
      lines[slot] = home_line(v, mix64(static_cast<std::uint64_t>(ids[i]) ^ v.salt), stripes[slot]);
      __builtin_prefetch(lines[slot]);
    }
  }
}

template <int kBytes>
inline void copy_fixed(char* to, const char* from) {
  __builtin_memcpy(to, from, kBytes);
}

inline void copy_row(char* to, const char* from, std::size_t bytes) {
  switch (bytes) {
    case 32: return copy_fixed<32>(to, from);
    case 64: return copy_fixed<64>(to, from);
    case 128: return copy_fixed<128>(to, from);
    case 256: return copy_fixed<256>(to, from);
    default: __builtin_memcpy(to, from, bytes);
  }
}

std::int64_t find_copy(const IndexView& index, const RowView& rows, const std::int64_t* ids,
                       std::int64_t n, char* out, std::uint8_t* found) {
  const StripeView* stripes[kWindow];
  const Line* lines[kWindow];
  const char* sources[kWindow];
  const IndexView v = index;
  const RowView r = rows;
  const std::size_t bytes =
      static_cast<std::size_t>(r.dim) * (r.dtype == DType::f64 ? 8U : 4U);
  std::int64_t missing = 0;
  for (std::int64_t i = 0; i < n + 2 * kWindow; ++i) {
    const std::int64_t slot = i & (kWindow - 1);
    if (i >= 2 * kWindow) {
      const std::int64_t at = i - 2 * kWindow;
      char* to = out + static_cast<std::size_t>(at) * bytes;
      if (sources[slot] != nullptr) {
        copy_row(to, sources[slot], bytes);
        found[at] = 1;
      } else {
        __builtin_memset(to, 0, bytes);
        found[at] = 0;
        ++missing;
      }
    }
    if (i >= kWindow && i < n + kWindow) {
      const std::int32_t row = probe(stripes[slot], lines[slot], ids[i - kWindow]);
      sources[slot] = row == kNoRow ? nullptr : weight_row(r, static_cast<std::uint32_t>(row));
      if (row != kNoRow) prefetch_bytes(sources[slot], bytes);
    }
    if (i < n) {
      lines[slot] = home_line(v, mix64(static_cast<std::uint64_t>(ids[i]) ^ v.salt), stripes[slot]);
      __builtin_prefetch(lines[slot]);
    }
  }
  return missing;
}

template <class T>
inline void read_row(const TableView& t, std::uint32_t row, std::int64_t global_step, T* out) {
  load_weights(t.rows.dtype, weight_row(t.rows, row), out, t.rows.dim);
  for (int k = 0; k < t.n_segments; ++k) retrieve(t.segments[k], global_step, out);
}

inline void read_initial(const TableView& t, std::int64_t id, float* out) {
  initial_row(RowMaker{t.segments, t.n_segments, t.key}, id, out);
  if (t.rows.dtype == DType::f16) {
    for (int i = 0; i < t.rows.dim; ++i) out[i] = half_to_float(float_to_half(out[i]));
  } else if (t.rows.dtype == DType::bf16) {
    for (int i = 0; i < t.rows.dim; ++i) out[i] = bf16_to_float(float_to_bf16(out[i]));
  }
}
inline void read_initial(const TableView& t, std::int64_t id, double* out) {
  float* narrow = reinterpret_cast<float*>(out + t.rows.dim);
  initial_row(RowMaker{t.segments, t.n_segments, t.key}, id, narrow);
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
inline void write_columns(T* to, const T* from, int n, T factor, bool add) {
  if (from == nullptr) {
    if (!add) {
      for (int i = 0; i < n; ++i) to[i] = 0;
    }
  } else if (add) {
    for (int i = 0; i < n; ++i) to[i] += from[i] * factor;
  } else if (factor == T(1)) {
    copy_row(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
             static_cast<std::size_t>(n) * sizeof(T));
  } else {
    for (int i = 0; i < n; ++i) to[i] = from[i] * factor;
  }
}

template <class T>
inline T* output_at(const GatherJob& job, const Slice& s, std::int64_t bag) {
  return static_cast<T*>(job.outputs[s.output]) + bag * job.widths[s.output] + s.column;
}

template <class T>
void gather_first_n(const GatherJob& job, std::int64_t bag, std::int64_t start, std::int64_t stop,
                    T* temp) {
  for (int j = 0; j < job.pool.length; ++j) {
    const std::int64_t position = start + j;
    const bool inside = position < stop;
    const T* row = inside ? row_at(job, position, temp) : nullptr;
    const T factor = inside && job.weights != nullptr ? static_cast<T>(job.weights[position]) : T(1);
    for (int k = 0; k < job.pool.n_slices; ++k) {
      const Slice& s = job.pool.slices[k];
      const int n = s.stop - s.start;
      write_columns(output_at<T>(job, s, bag) + j * n, row == nullptr ? nullptr : row + s.start, n,
                    factor, s.add);
    }
  }
}

template <class T>
void gather_bag(const GatherJob& job, std::int64_t bag, std::int64_t start, std::int64_t stop,
                T* temp) {
  const T bag_factor = job.pool.pooling == Pooling::mean && stop - start > 1
                           ? T(1) / static_cast<T>(stop - start)
                           : T(1);
  for (int k = 0; k < job.pool.n_slices; ++k) {
    const Slice& s = job.pool.slices[k];
    if (start == stop) write_columns<T>(output_at<T>(job, s, bag), nullptr, s.stop - s.start, 1, s.add);
  }
  for (std::int64_t position = start; position < stop; ++position) {
    const T* row = row_at(job, position, temp);
    const T factor = job.weights == nullptr
                         ? bag_factor
                         : bag_factor * static_cast<T>(job.weights[position]);
    for (int k = 0; k < job.pool.n_slices; ++k) {
      const Slice& s = job.pool.slices[k];
      write_columns(output_at<T>(job, s, bag), row == nullptr ? nullptr : row + s.start,
                    s.stop - s.start, factor, s.add || position > start);
    }
  }
}

// One id a bag, whole rows as stored, one slice: the copy that most features are.
template <class T>
inline bool single_copy(const GatherJob& job) {
  return job.table.plain && job.weights == nullptr && job.pool.pooling != Pooling::first_n &&
         job.pool.n_slices == 1 && !job.pool.slices[0].add;
}

template <class T>
void gather_bags(const GatherJob& job, std::int64_t bag_start, std::int64_t bag_stop, T* temp) {
  const std::size_t bytes = static_cast<std::size_t>(job.table.rows.dim) *
                            (job.table.rows.dtype == DType::f64   ? 8U
                             : job.table.rows.dtype == DType::f32 ? 4U
                                                                  : 2U);
  const std::int64_t last =
      job.offsets == nullptr ? job.first + bag_stop : job.offsets[bag_stop];
  const bool single = single_copy<T>(job);
  const Slice slice = single ? job.pool.slices[0] : Slice{0, 0, 0, 0, false};
  const std::size_t width = static_cast<std::size_t>(slice.stop - slice.start) * sizeof(T);
  T* target = single ? output_at<T>(job, slice, bag_start) : nullptr;
  const std::int64_t stride = single ? job.widths[slice.output] : 0;
  std::int64_t fetched = job.offsets == nullptr ? job.first + bag_start : job.offsets[bag_start];
  for (std::int64_t bag = bag_start; bag < bag_stop; ++bag) {
    const std::int64_t start = job.offsets == nullptr ? job.first + bag : job.offsets[bag];
    const std::int64_t stop = job.offsets == nullptr ? start + 1 : job.offsets[bag + 1];
    const std::int64_t ahead = stop + kWindow < last ? stop + kWindow : last;
    for (; fetched < ahead; ++fetched) {
      const std::int32_t row = job.rows[fetched];
      if (row >= 0) {
        prefetch_bytes(weight_row(job.table.rows, static_cast<std::uint32_t>(row)), bytes);
      }
    }
    if (single && stop - start == 1 && job.rows[start] >= 0) {
      const auto row = static_cast<std::uint32_t>(job.rows[start]);
      const char* from = weight_row(job.table.rows, row) + slice.start * sizeof(T);
      copy_row(reinterpret_cast<char*>(target + (bag - bag_start) * stride), from, width);
    } else if (job.pool.pooling == Pooling::first_n) {
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
