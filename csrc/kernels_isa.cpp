// Compiled once per instruction set with SHOAL_ISA naming it. Everything but the table of pointers
// at the end has internal linkage: no code compiled for a wide set may serve a narrow machine.
#include <cstring>
#include <limits>

#include "kernels.h"

namespace shoal {
namespace {
inline std::size_t element_size(DType dtype) {
  return dtype == DType::f64 ? 8U : dtype == DType::f32 ? 4U : 2U;
}
}  // namespace
}  // namespace shoal

#include "gather_impl.h"
#include "apply_impl.h"

namespace shoal {
namespace {

bool is_double(const TableView& t) { return t.rows.dtype == DType::f64; }

std::int64_t apply(const ApplyJob& job, const Item* items, std::uint32_t m, ApplyScratch& s) {
  return is_double(job.table) ? apply_typed<double>(job, items, m, s)
                              : apply_typed<float>(job, items, m, s);
}

std::uint32_t sum(const ApplyJob& job, const Item* items, std::uint32_t m, ApplyScratch& s,
                  SumOut* out) {
  return is_double(job.table) ? sum_typed<double>(job, items, m, s, out)
                              : sum_typed<float>(job, items, m, s, out);
}

template <class T>
void init_row_state(const TableView& t, std::uint32_t row) {
  if (t.rows.state_width == 0) return;
  T* state = reinterpret_cast<T*>(state_row(t.rows, row));
  for (int k = 0; k < t.n_segments; ++k) {
    initial_state(t.segments[k], state + t.segments[k].state_column);
  }
}

void init_rows(const TableView& t, const std::int64_t* ids, const std::int32_t* rows,
               std::int64_t n, StepParams step) {
  constexpr std::int64_t kStack = 4096;
  float stack[kStack];
  const int d = t.rows.dim;
  float* heap = d > kStack ? new float[static_cast<std::size_t>(d)] : nullptr;
  float* values = heap != nullptr ? heap : stack;
  const std::int64_t batch = kStack / d > 0 ? kStack / d : 1;
  const RowMaker maker{t.segments, t.n_segments, t.key};
  for (std::int64_t at = 0; at < n; at += batch) {
    const std::int64_t stop = at + batch < n ? at + batch : n;
    initial_rows(maker, ids + at, stop - at, values, d);
    for (std::int64_t i = at; i < stop; ++i) {
      const auto row = static_cast<std::uint32_t>(rows[i]);
      store_nearest(t.rows.dtype, values + (i - at) * d, weight_row(t.rows, row), d);
      if (is_double(t)) {
        init_row_state<double>(t, row);
      } else {
        init_row_state<float>(t, row);
      }
      row_id(t.rows, row) = ids[i];
      row_version(t.rows, row) = step.epoch;
      row_seen(t.rows, row) = LastSeen{step.event_time_s, 0};
    }
  }
  delete[] heap;
}

template <class T>
bool all_finite(const T* x, std::int64_t n) {
  // x * 0 is NaN exactly for NaN and infinities; lanes keep the sum vectorised and in cache order.
  T lanes[16] = {};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) lanes[k] += x[i + k] * T(0);
  }
  for (; i < n; ++i) lanes[0] += x[i] * T(0);
  T total = 0;
  for (int k = 0; k < 16; ++k) total += lanes[k];
  return total == 0;
}

bool finite32(const float* x, std::int64_t n) { return all_finite(x, n); }
bool finite64(const double* x, std::int64_t n) { return all_finite(x, n); }

}  // namespace

#define SHOAL_JOIN(a, b) a##b
#define SHOAL_NAME(isa) SHOAL_JOIN(kernels_, isa)
#define SHOAL_QUOTE(isa) #isa
#define SHOAL_STRING(isa) SHOAL_QUOTE(isa)

extern const Kernels SHOAL_NAME(SHOAL_ISA);
const Kernels SHOAL_NAME(SHOAL_ISA) = {
    SHOAL_STRING(SHOAL_ISA), probe_ids, find_copy, gather, apply, sum, init_rows, finite32,
    finite64,
};

}  // namespace shoal
