// Compiled once per instruction set with SHOAL_ISA naming it. Everything but the table of pointers
// at the end has internal linkage: no code compiled for a wide set may serve a narrow machine.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

#include "gather_impl.h"
#include "apply_impl.h"
#include "text_hash_impl.h"

namespace shoal {
namespace {

bool is_double(const TableView& t) { return t.rows.dtype == DType::f64; }

std::int64_t apply(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  return is_double(job.table) ? apply_typed<double>(job, items, s)
                              : apply_typed<float>(job, items, s);
}

std::uint32_t sum(const ApplyJob& job, const Items& items, const ApplyScratch& s) {
  return is_double(job.table) ? sum_typed<double>(job, items, s) : sum_typed<float>(job, items, s);
}

template <class T>
void fill_state(const TableView& t, T* state) {
  for (int i = 0; i < t.rows.state_width; ++i) state[i] = static_cast<T>(t.state[i]);
}

// Rows of new ids, eight at a time: what is short of eight repeats its last row.
void init_rows(const TableView& t, const std::int64_t* ids, const std::int32_t* numbers,
               std::int64_t n, StepParams step, bool large) {
  const RowView v = t.rows;
  const RowMaker maker{t.segments, t.n_segments, t.key, t.first_column};
  const std::size_t row_weights = weight_bytes(v), row_state = state_bytes(v);
  // New rows follow each other: whole ones fill whole lines, which need not be read first.
  const bool stream = large && v.dtype == DType::f32 && n > 0 && row_weights % 64 == 0 &&
                      v.weight_stride == v.state_stride &&
                      streamable(weight_row(v, static_cast<std::uint32_t>(numbers[0])),
                                 v.weight_stride);
  const bool direct = v.dtype == DType::f32 && !stream;
  const std::size_t rest = stream ? v.weight_stride - row_weights : row_state;
  // One state row, then eight rows of values for tables that do not get them in place.
  const std::size_t room = (std::max(rest, row_state) + 127) & ~std::size_t{63};
  std::vector<char> scratch(room + (direct ? 0 : kPhiloxLanes * row_weights * 4));
  if (is_double(t)) {
    fill_state(t, reinterpret_cast<double*>(scratch.data()));
  } else {
    fill_state(t, reinterpret_cast<float*>(scratch.data()));
  }
  auto* values = reinterpret_cast<float*>(scratch.data() + room);
  for (std::int64_t at = 0; at < n; at += kPhiloxLanes) {
    const auto live = static_cast<int>(n - at < kPhiloxLanes ? n - at : kPhiloxLanes);
    std::int64_t lane_ids[kPhiloxLanes];
    float* rows[kPhiloxLanes];
    const BlockView* blocks[kPhiloxLanes];
    for (int l = 0; l < kPhiloxLanes; ++l) {
      const std::int64_t i = at + (l < live ? l : live - 1);
      const auto row = static_cast<std::uint32_t>(numbers[i]);
      lane_ids[l] = ids[i];
      blocks[l] = &block_view(v, row);
      rows[l] = direct ? reinterpret_cast<float*>(blocks[l]->weights + row * v.weight_stride)
                       : values + static_cast<std::ptrdiff_t>(l) * v.dim;
    }
    initial_rows(maker, lane_ids, rows);
    for (int l = 0; l < live; ++l) {
      const auto row = static_cast<std::uint32_t>(numbers[at + l]);
      const BlockView& block = *blocks[l];
      char* const weights = block.weights + row * v.weight_stride;
      if (stream) {
        stream_bytes(weights, reinterpret_cast<const char*>(rows[l]), row_weights);
        stream_bytes(weights + row_weights, scratch.data(), rest);
      } else {
        if (!direct) store_nearest(v.dtype, rows[l], weights, v.dim);
        copy_bytes(block.state + row * v.state_stride, scratch.data(), row_state);
      }
      reinterpret_cast<std::int64_t*>(block.ids)[row] = lane_ids[l];
      reinterpret_cast<std::uint32_t*>(block.versions)[row] = step.version;
      raise_maximum(row_maximum(v, row), step.version);
      reinterpret_cast<LastSeen*>(block.seen)[row] = LastSeen{step.event_time_s, 0};
    }
  }
  if (stream) end_stream();
}

// Bits of absolute values compare as the values do, and those of NaN are above infinity's.
template <class T, class Bits>
double largest_as(const T* x, std::int64_t n) {
  constexpr Bits kSize = std::numeric_limits<Bits>::max();
  Bits lanes[16] = {};
  std::int64_t i = 0;
  const auto take = [&](std::int64_t at, int lane) {
    Bits bits;
    std::memcpy(&bits, x + at, sizeof(bits));
    bits &= kSize;
    lanes[lane] = lanes[lane] > bits ? lanes[lane] : bits;
  };
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) take(i + k, k);
  }
  for (; i < n; ++i) take(i, 0);
  for (int k = 1; k < 16; ++k) lanes[0] = lanes[0] > lanes[k] ? lanes[0] : lanes[k];
  T value;
  std::memcpy(&value, lanes, sizeof(value));
  return value <= std::numeric_limits<T>::max() ? static_cast<double>(value) : HUGE_VAL;
}

// Bit i: version i of 64 lies in (from, from + span]. One unsigned comparison each:
// version - from - 1 wraps for versions that are not above `from`.
inline std::uint64_t between_mask(const std::uint32_t* versions, std::uint32_t from,
                                  std::uint32_t span) {
  std::uint64_t mask = 0;
#if defined(__AVX512F__)
  const __m512i base = _mm512_set1_epi32(static_cast<int>(from + 1));
  const __m512i width = _mm512_set1_epi32(static_cast<int>(span));
  for (int k = 0; k < 4; ++k) {
    const __m512i x = _mm512_sub_epi32(_mm512_loadu_si512(versions + 16 * k), base);
    mask |= std::uint64_t{_mm512_cmplt_epu32_mask(x, width)} << (16 * k);
  }
#elif defined(__AVX2__)
  const __m256i base = _mm256_set1_epi32(static_cast<int>(from + 1));
  const __m256i most = _mm256_set1_epi32(static_cast<int>(span - 1));  // span is not 0
  for (int k = 0; k < 8; ++k) {
    const auto* at = reinterpret_cast<const __m256i*>(versions + 8 * k);
    const __m256i x = _mm256_sub_epi32(_mm256_loadu_si256(at), base);
    const __m256i hit = _mm256_cmpeq_epi32(_mm256_min_epu32(x, most), x);
    const auto bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(hit)));
    mask |= std::uint64_t{bits} << (8 * k);
  }
#else
  std::uint32_t any = 0;
  for (int i = 0; i < 64; ++i) any |= versions[i] - from - 1 < span ? 1U : 0U;
  if (any == 0) return 0;
  for (int i = 0; i < 64; ++i) {
    mask |= std::uint64_t{versions[i] - from - 1 < span ? 1U : 0U} << i;
  }
#endif
  return mask;
}

std::size_t find_between(const std::uint32_t* versions, std::size_t n, std::uint32_t from,
                         std::uint32_t to, std::uint32_t* places) {
  const std::uint32_t span = to - from;
  if (span == 0) return 0;
  std::size_t found = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    // The processor's own prefetching ends with the page.
    for (std::size_t line = 0; line < 64; line += 16) {
      __builtin_prefetch(versions + i + 1024 + line);
    }
    for (std::uint64_t mask = between_mask(versions + i, from, span); mask != 0; mask &= mask - 1) {
      places[found++] = static_cast<std::uint32_t>(i) +
                        static_cast<std::uint32_t>(__builtin_ctzll(mask));
    }
  }
  for (; i < n; ++i) {
    if (versions[i] - from - 1 < span) places[found++] = static_cast<std::uint32_t>(i);
  }
  return found;
}

double largest(const void* x, std::int64_t n, bool wide) {
  return wide ? largest_as<double, std::int64_t>(static_cast<const double*>(x), n)
              : largest_as<float, std::int32_t>(static_cast<const float*>(x), n);
}

}  // namespace

#define SHOAL_KERNELS(isa, ...)      \
  extern const Kernels kernels_##isa; \
  const Kernels kernels_##isa = {#isa, __VA_ARGS__};
#define SHOAL_KERNELS_OF(isa, ...) SHOAL_KERNELS(isa, __VA_ARGS__)

SHOAL_KERNELS_OF(
    SHOAL_ISA, probe_ids, find_copy, gather, apply, sum, init_rows,
    find_between, largest, blake_blocks)

}  // namespace shoal
