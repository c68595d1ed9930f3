#pragma once
// Plain values that describe a table to the kernels: dtypes, rules, segments, row geometry.
#include <cstddef>
#include <cstdint>

namespace shoal {

// i8: codes, then the row's scale as fp32.
enum class DType : std::uint8_t { f32 = 0, f16 = 1, bf16 = 2, f64 = 3, i8 = 4 };

enum class RuleKind : std::uint8_t;  // rules_impl.h lists them
constexpr int kMostParams = 8;       // of a rule

enum class InitKind : std::uint8_t { constant, uniform, normal, truncated_normal };

enum class RetrieverKind : std::uint8_t { identity, fixed_r8, one_bit };

struct RuleParams {
  RuleKind kind{};
  double params[kMostParams] = {};  // in the order that the rule's step names them
  bool delay_compensated = false;
  double strength = 0;
};

struct InitParams {
  InitKind kind = InitKind::constant;
  float a = 0, b = 0;  // constant: a; uniform: minval, maxval; normals: mean, std
};

struct RetrieverParams {
  RetrieverKind kind = RetrieverKind::identity;
  double r = 1, step_size = 200, init_scale = 1, max_scale = 10000, amplitude = 0.1;
};

struct Segment {
  int column = 0, dim = 0;
  int state_column = 0;
  RuleParams rule;
  InitParams init;
  RetrieverParams retriever;
};

// Rows live in blocks that never move. Block 0 holds 2^first rows, the next ones double until
// 2^chunk rows, all later ones hold 2^chunk: small tables stay small, large ones need few blocks.
struct Geometry {
  int first = 8;
  int chunk = 16;
};

constexpr int kMaximumShift = 10;  // rows that share a maximum of their versions: 1,024

struct LastSeen {
  std::uint32_t seconds;
  std::uint32_t count;
};

// One block's arrays. Pointers are biased by the first row of the block, so `base + row * stride` is
// the row; together they fill less than a cache line.
struct BlockView {
  char* weights;
  char* state;
  char* ids;
  char* versions;
  char* seen;
};

struct RowView {
  const BlockView* blocks = nullptr;
  std::uint32_t* maxima = nullptr;  // by row >> kMaximumShift: no row there has a later version
  std::size_t weight_stride = 0, state_stride = 0;
  Geometry geometry;
  int dim = 0, state_width = 0;
  DType dtype = DType::f32;
};

// Rows as they are handed in and out: a value a row, and rows of weights as stored and of state.
// No state: without it.
struct RowColumns {
  std::int64_t *ids, *versions, *seen_s, *counts;
  char *weights, *state;
};

namespace {

// Of a value to be read or of state.
inline std::size_t real_bytes(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

// Of the weights and the state of a row.
inline std::size_t weight_bytes(const RowView& v) {
  const auto d = static_cast<std::size_t>(v.dim);
  if (v.dtype == DType::i8) return d + 4;
  return d * (v.dtype == DType::f64 ? 8 : v.dtype == DType::f32 ? 4 : 2);
}
inline std::size_t state_bytes(const RowView& v) {
  return static_cast<std::size_t>(v.state_width) * real_bytes(v.dtype);
}

inline int block_of(const Geometry& g, std::uint32_t row) {
  const std::uint32_t high = row >> g.chunk;
  if (high != 0) return static_cast<int>(high) + (g.chunk - g.first);
  const std::uint32_t low = row >> g.first;
  return low == 0 ? 0 : 32 - __builtin_clz(low);
}

inline const BlockView& block_view(const RowView& v, std::uint32_t row) {
  return v.blocks[block_of(v.geometry, row)];
}

inline char* weight_row(const RowView& v, std::uint32_t row) {
  return block_view(v, row).weights + std::size_t{row} * v.weight_stride;
}
inline char* state_row(const RowView& v, std::uint32_t row) {
  return block_view(v, row).state + std::size_t{row} * v.state_stride;
}
inline std::int64_t& row_id(const RowView& v, std::uint32_t row) {
  return *reinterpret_cast<std::int64_t*>(block_view(v, row).ids + std::size_t{row} * 8);
}
inline std::uint32_t& row_version(const RowView& v, std::uint32_t row) {
  return *reinterpret_cast<std::uint32_t*>(block_view(v, row).versions + std::size_t{row} * 4);
}
inline std::uint32_t* row_maximum(const RowView& v, std::uint32_t row) {
  return v.maxima + (row >> kMaximumShift);
}

// Threads of one call may stamp neighbours, all with the version of that call.
inline void raise_maximum(std::uint32_t* maximum, std::uint32_t version) {
  if (__atomic_load_n(maximum, __ATOMIC_RELAXED) < version) {
    __atomic_store_n(maximum, version, __ATOMIC_RELAXED);
  }
}

// Threads that stamp neighbours with versions of their own.
inline void raise_maximum_together(std::uint32_t* maximum, std::uint32_t version) {
  std::uint32_t seen = __atomic_load_n(maximum, __ATOMIC_RELAXED);
  while (seen < version && !__atomic_compare_exchange_n(maximum, &seen, version, true,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline LastSeen& row_seen(const RowView& v, std::uint32_t row) {
  return *reinterpret_cast<LastSeen*>(block_view(v, row).seen + std::size_t{row} * 8);
}

}  // namespace
}  // namespace shoal
