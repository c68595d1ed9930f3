#pragma once
// Bits of a row: initial values, reading any dtype through a retriever, rounding back to storage.
// Included by kernels_isa.cpp only. Oracles: src/shoal/rules/{initializers,compressors,rounding}.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "hash.h"
#include "layout.h"
#include "quantiles.h"

namespace shoal {
namespace {

inline std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float bf16_to_float(std::uint16_t h) { return bits_float(std::uint32_t{h} << 16); }

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000U} << 16;
  const std::uint32_t exponent = (h >> 10) & 31U, mantissa = h & 1023U;
  if (exponent == 31) return bits_float(sign | 0x7f800000U | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-08F;
  return sign != 0 ? -tiny : tiny;
}

// Round to nearest even.
inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = float_bits(x);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return sign | 0x7e00U;
  if (size >= 0x477ff000U) return sign | 0x7c00U;
  if (size < 0x38800000U) {
    const float scaled = bits_float(size) + 0.5F;  // the sum's low mantissa bits are the result
    return sign | static_cast<std::uint16_t>(float_bits(scaled) - 0x3f000000U);
  }
  const std::uint32_t odd = (size >> 13) & 1U;
  return sign | static_cast<std::uint16_t>((size - 0x38000000U + 0xfffU + odd) >> 13);
}

inline std::uint16_t float_to_bf16(float x) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 64U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

inline std::uint16_t stochastic_bf16(float x, std::uint32_t random) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7f800000U) == 0x7f800000U) return float_to_bf16(x);
  return static_cast<std::uint16_t>((bits + (random & 0xffffU)) >> 16);
}

inline std::uint16_t stochastic_half(float x, std::uint32_t random) {
  const std::uint16_t near = float_to_half(x);
  const float rounded = half_to_float(near);
  if (rounded == x || (near & 0x7c00U) == 0x7c00U) return near;
  // The other neighbour lies on x's side of the nearest one.
  const bool up = (x > rounded) == ((near & 0x8000U) == 0);
  std::uint16_t other = static_cast<std::uint16_t>(up ? near + 1 : near - 1);
  if (rounded == 0) other = x > 0 ? 0x0001U : 0x8001U;
  const float next = half_to_float(other);
  if (std::isinf(next)) return near;
  const float low = x > rounded ? rounded : next, high = x > rounded ? next : rounded;
  const std::uint16_t low_bits = x > rounded ? near : other;
  const std::uint16_t high_bits = x > rounded ? other : near;
  const float u = static_cast<float>(random >> 8) * 5.9604644775390625e-08F;
  return u < (x - low) / (high - low) ? high_bits : low_bits;
}

inline float quantile(const float* table, std::uint32_t x) {
  const std::uint32_t i = x >> 20;
  const float f = static_cast<float>(x & 0xfffffU) * 9.5367431640625e-07F;
  const float step = f * (table[i + 1] - table[i]);
  return table[i] + step;
}

inline float initial_value(const InitParams& init, float width, std::uint32_t x) {
  switch (init.kind) {
    case InitKind::constant: return init.a;
    case InitKind::uniform: {
      const float scaled =
          static_cast<float>(static_cast<std::int32_t>(x >> 8)) * 5.9604644775390625e-08F * width;
      return scaled + init.a;
    }
    case InitKind::normal: {
      const float scaled = quantile(kNormalQuantiles, x) * init.b;
      return scaled + init.a;
    }
    case InitKind::truncated_normal: {
      const float scaled = quantile(kTruncatedQuantiles, x) * init.b;
      return scaled + init.a;
    }
  }
  return 0;
}

struct RowMaker {
  const Segment* segments;
  int n_segments;
  std::uint64_t key;  // mix64(seed ^ salt)
  int first_column;   // of the row that words are counted in: column c draws the word of c + this
};

inline void initial_row(const RowMaker& maker, std::int64_t id, float* out) {
  for (int k = 0; k < maker.n_segments; ++k) {
    const Segment& s = maker.segments[k];
    if (s.init.kind == InitKind::constant) {
      std::fill(out + s.column, out + s.column + s.dim, s.init.a);
      continue;
    }
    const float width = s.init.b - s.init.a;
    const int start = maker.first_column + s.column, stop = start + s.dim;
    for (int block = start / 4; block * 4 < stop; ++block) {
      const PhiloxBlock bits = philox(maker.key, static_cast<std::uint64_t>(id),
                                      static_cast<std::uint32_t>(block), 0);
      for (int lane = 0; lane < 4; ++lane) {
        const int c = block * 4 + lane;
        if (c < start || c >= stop) continue;
        out[c - maker.first_column] = initial_value(s.init, width, bits.lane[lane]);
      }
    }
  }
}

// Values of the words of eight blocks, four columns each.
inline void block_values(const InitParams& init, float width,
                         const PhiloxBlock (&words)[kPhiloxLanes],
                         float (&values)[kPhiloxLanes][4]) {
  constexpr int kWords = 4 * kPhiloxLanes;
  const auto* from = reinterpret_cast<const std::uint32_t*>(words);
  auto* to = reinterpret_cast<float*>(values);
  if (init.kind == InitKind::uniform) {
    for (int i = 0; i < kWords; ++i) {
      const auto whole = static_cast<std::int32_t>(from[i] >> 8);
      const float scaled = static_cast<float>(whole) * 5.9604644775390625e-08F * width;
      to[i] = scaled + init.a;
    }
    return;
  }
  for (int i = 0; i < kWords; ++i) to[i] = initial_value(init, width, from[i]);
}

// Initial values of eight rows at once; rows[l] is where row l of ids[l] goes.
inline void initial_rows(const RowMaker& maker, const std::int64_t (&ids)[kPhiloxLanes],
                         float* const (&rows)[kPhiloxLanes]) {
  const PhiloxIds lanes = philox_ids(ids);
  for (int k = 0; k < maker.n_segments; ++k) {
    const Segment& s = maker.segments[k];
    if (s.init.kind == InitKind::constant) {
      for (float* row : rows) std::fill(row + s.column, row + s.column + s.dim, s.init.a);
      continue;
    }
    const int start = maker.first_column + s.column, stop = start + s.dim;
    const float width = s.init.b - s.init.a;
    for (int block = start / 4; block * 4 < stop; ++block) {
      PhiloxBlock words[kPhiloxLanes];
      float values[kPhiloxLanes][4];
      philox_lanes(maker.key, lanes, static_cast<std::uint32_t>(block), 0, words);
      block_values(s.init, width, words, values);
      const int first = std::max(start - block * 4, 0), last = std::min(stop - block * 4, 4);
      const int c = block * 4 - maker.first_column;  // of the row; with `first`, not negative
      if (last - first == 4) {
        for (int l = 0; l < kPhiloxLanes; ++l) std::memcpy(rows[l] + c, values[l], 16);
        continue;
      }
      for (int l = 0; l < kPhiloxLanes; ++l) {
        for (int j = first; j < last; ++j) rows[l][c + j] = values[l][j];
      }
    }
  }
}

// Rows of 8 bits: multiples of a scale, of which the largest finite weight is 127.
inline float int8_scale(const float* in, int d) {
  float most = 0;
  for (int i = 0; i < d; ++i) {
    const float size = std::fabs(in[i]);
    if (std::isfinite(size)) most = std::max(most, size);
  }
  return most / 127.0F;
}
inline float int8_code(float x, float scale) {
  const float code = x / scale;
  return std::isnan(code) ? 0.0F : std::nearbyint(std::clamp(code, -127.0F, 127.0F));
}

// Storage to float/double and back, without retrievers.
inline void load_weights(DType dtype, const char* row, float* out, int d) {
  if (dtype == DType::f32) {
    std::memcpy(out, row, static_cast<std::size_t>(d) * 4);
    return;
  }
  if (dtype == DType::i8) {
    float scale;
    std::memcpy(&scale, row + d, 4);
    const auto* codes = reinterpret_cast<const std::int8_t*>(row);
    for (int i = 0; i < d; ++i) out[i] = static_cast<float>(codes[i]) * scale;
    return;
  }
  const auto* bits = reinterpret_cast<const std::uint16_t*>(row);
  if (dtype == DType::f16) {
    for (int i = 0; i < d; ++i) out[i] = half_to_float(bits[i]);
  } else {
    for (int i = 0; i < d; ++i) out[i] = bf16_to_float(bits[i]);
  }
}
inline void load_weights(DType, const char* row, double* out, int d) {
  std::memcpy(out, row, static_cast<std::size_t>(d) * 8);
}

inline void store_nearest(DType dtype, const float* in, char* row, int d) {
  if (dtype == DType::f32) {
    std::memcpy(row, in, static_cast<std::size_t>(d) * 4);
  } else if (dtype == DType::f64) {
    auto* out = reinterpret_cast<double*>(row);
    for (int i = 0; i < d; ++i) out[i] = in[i];
  } else if (dtype == DType::i8) {
    const float scale = int8_scale(in, d);
    for (int i = 0; i < d; ++i) row[i] = static_cast<char>(int8_code(in[i], scale));
    std::memcpy(row + d, &scale, 4);
  } else {
    auto* out = reinterpret_cast<std::uint16_t*>(row);
    for (int i = 0; i < d; ++i) {
      out[i] = dtype == DType::f16 ? float_to_half(in[i]) : float_to_bf16(in[i]);
    }
  }
}

inline void store_stochastic(const RowMaker& maker, DType dtype, std::int64_t id,
                             std::int64_t global_step, const float* in, char* row, int d) {
  const auto domain = static_cast<std::uint32_t>(1 | ((global_step & 0x7fffffff) << 1));
  auto* out = reinterpret_cast<std::uint16_t*>(row);
  const int stop = maker.first_column + d;
  for (int block = maker.first_column / 4; block * 4 < stop; ++block) {
    const PhiloxBlock bits = philox(maker.key, static_cast<std::uint64_t>(id),
                                    static_cast<std::uint32_t>(block), domain);
    const int last = std::min(stop - block * 4, 4);
    for (int lane = std::max(maker.first_column - block * 4, 0); lane < last; ++lane) {
      const int c = block * 4 + lane - maker.first_column;
      out[c] = dtype == DType::f16 ? stochastic_half(in[c], bits.lane[lane])
                                   : stochastic_bf16(in[c], bits.lane[lane]);
    }
  }
}

inline double one_bit_scale(const RetrieverParams& p, std::int64_t global_step) {
  const auto size = static_cast<std::int64_t>(p.step_size);
  const double s = static_cast<double>(global_step - global_step % size);
  const double scale = p.init_scale * std::sqrt(1.0 + 0.005 * s);
  return scale < p.max_scale ? scale : p.max_scale;
}

template <class T>
inline void retrieve(const Segment& s, std::int64_t global_step, T* row) {
  T* w = row + s.column;
  if (s.retriever.kind == RetrieverKind::fixed_r8) {
    const T unit = static_cast<T>(s.retriever.r) / T(128);
    for (int i = 0; i < s.dim; ++i) {
      T q = std::round(w[i] / unit);
      q = q < T(-128) ? T(-128) : q > T(127) ? T(127) : q;
      w[i] = std::isnan(w[i]) ? T(0) : q * unit;
    }
  } else if (s.retriever.kind == RetrieverKind::one_bit) {
    const T scale = static_cast<T>(one_bit_scale(s.retriever, global_step));
    const T amplitude = static_cast<T>(s.retriever.amplitude);
    for (int i = 0; i < s.dim; ++i) w[i] = amplitude * std::tanh(scale * w[i]);
  }
}

template <class T>
inline void retrieve_backward(const Segment& s, std::int64_t global_step, const T* w, T* g) {
  if (s.retriever.kind != RetrieverKind::one_bit) return;
  const T scale = static_cast<T>(one_bit_scale(s.retriever, global_step));
  const T amplitude = static_cast<T>(s.retriever.amplitude);
  for (int i = 0; i < s.dim; ++i) {
    const T t = std::tanh(scale * w[i]);
    g[i] *= amplitude * scale * (T(1) - t * t);
  }
}

}  // namespace
}  // namespace shoal
