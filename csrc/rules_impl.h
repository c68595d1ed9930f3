#pragma once
// One optimizer step of one segment of one row, for float and double. Formulas, defaults and
// sources: docs/reference/rules.md; oracle: src/shoal/rules/optimizers.py, whose `params` a step
// names in that order after its first argument.
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "layout.h"

namespace shoal {

#define SHOAL_RULES(X)                               \
  X(sgd, step_sgd<T>)                                \
  X(momentum, step_momentum<T>)                      \
  X(adagrad, step_adagrad<T>)                        \
  X(rowwise_adagrad, step_rowwise_adagrad<T>)        \
  X(adadelta, step_adadelta<T>)                      \
  X(adam, step_adam_family<T, false>)                \
  X(adamw, step_adamw<T>)                            \
  X(amsgrad, step_adam_family<T, true>)              \
  X(ftrl, step_ftrl<T>)                              \
  X(group_ftrl, step_group_ftrl<T>)                  \
  X(group_adagrad, step_group_adagrad<T>)            \
  X(dynamic_wd_adagrad, step_dynamic_wd_adagrad<T>)  \
  X(rmsprop, step_rmsprop<T>)                        \
  X(moving_average, step_moving_average<T>)          \
  X(batch_softmax, step_batch_softmax<T>)            \
  X(sign_sgd, step_sign_sgd<T>)                      \
  X(lamb, step_lamb<T>)

enum class RuleKind : std::uint8_t {
#define SHOAL_RULE(name, ...) name,
  SHOAL_RULES(SHOAL_RULE)
#undef SHOAL_RULE
};

namespace {

// A rule's parameters in the precision of the row.
template <class T>
struct RuleConstants {
  T params[kMostParams];

  explicit RuleConstants(const RuleParams& rule) {
    for (int i = 0; i < kMostParams; ++i) params[i] = static_cast<T>(rule.params[i]);
  }
};

template <class T>
struct RuleStep {
  const T* params;
  T* w;
  T* s;
  const T* g;
  int d;
  T lr;
  std::int64_t global_step;
};

// Eight running sums, joined in one order: as wide as the widest vectors of doubles, and the same
// bits on every instruction set.
template <class T, class Term>
inline T lane_sum(int d, const Term& term) {
  constexpr int kLanes = 8;
  T lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] += term(i + k);
  }
  for (int k = 0; i < d; ++i, ++k) lanes[k] += term(i);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class T>
inline T square_sum(const T* x, int d) {
  return lane_sum<T>(d, [x](int i) { return x[i] * x[i]; });
}

template <class T>
inline void step_momentum(const RuleStep<T>& a, T mu, T wd, T nesterov) {
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T old = a.s[i];
    const T n = mu * old - a.lr * (a.g[i] + wd * a.w[i]);
    a.s[i] = n;
    a.w[i] += nesterov != 0 ? (T(1) + mu) * n - mu * old : n;
  }
}

template <class T>
inline void step_adagrad(const RuleStep<T>& a, T wd, T eps) {
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + wd * a.w[i];
    const T n = a.s[i] + g * g;
    a.s[i] = n;
    a.w[i] -= a.lr * g / (std::sqrt(n) + eps);
  }
}

template <class T>
inline void step_rowwise_adagrad(const RuleStep<T>& a, T wd, T eps) {
  const T total = lane_sum<T>(a.d, [&](int i) {
    const T g = a.g[i] + wd * a.w[i];
    return g * g;
  });
  a.s[0] += total / static_cast<T>(a.d);
  const T denominator = std::sqrt(a.s[0]) + eps;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    a.w[i] -= a.lr * (a.g[i] + wd * a.w[i]) / denominator;
  }
}

template <class T>
inline void step_adadelta(const RuleStep<T>& a, T rho, T eps, T wd) {
  T* acc = a.s;
  T* update = a.s + a.d;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + wd * a.w[i];
    acc[i] = rho * acc[i] + (T(1) - rho) * g * g;
    const T u = g * std::sqrt(update[i] + eps) / std::sqrt(acc[i] + eps);
    a.w[i] -= a.lr * u;
    update[i] = rho * update[i] + (T(1) - rho) * u * u;
  }
}

template <class T, bool amsgrad>
inline void step_adam_family(const RuleStep<T>& a, T b1, T b2, T eps, T wd, T nesterov) {
  T* m = a.s;
  T* v = a.s + a.d;
  T* top = a.s + 2 * a.d;
  T* powers = a.s + (amsgrad ? 3 : 2) * a.d;
  const T rate = a.lr * std::sqrt(T(1) - powers[1]) / (T(1) - powers[0]);
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + wd * a.w[i];
    m[i] += (g - m[i]) * (T(1) - b1);
    v[i] += (g * g - v[i]) * (T(1) - b2);
    T second = v[i];
    if (amsgrad) {
      top[i] = top[i] > second ? top[i] : second;
      second = top[i];
    }
    const T first = nesterov != 0 ? (T(1) - b1) * g + b1 * m[i] : m[i];
    a.w[i] -= rate * first / (std::sqrt(second) + eps);
  }
  powers[0] *= b1;
  powers[1] *= b2;
}

template <class T>
inline void step_adamw(const RuleStep<T>& a, T b1, T b2, T eps, T wd) {
  const T keep = T(1) - a.lr * wd;
  T* m = a.s;
  T* v = a.s + a.d;
  T* powers = a.s + 2 * a.d;
  const T rate = a.lr / (T(1) - powers[0]);
  const T root = std::sqrt(T(1) - powers[1]);
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i];
    m[i] += (g - m[i]) * (T(1) - b1);
    v[i] += (g * g - v[i]) * (T(1) - b2);
    a.w[i] = a.w[i] * keep - rate * m[i] / (std::sqrt(v[i]) / root + eps);
  }
  powers[0] *= b1;
  powers[1] *= b2;
}

template <class T>
inline void step_lamb(const RuleStep<T>& a, T b1, T b2, T eps, T wd) {
  T* m = a.s;
  T* v = a.s + a.d;
  T* powers = a.s + 2 * a.d;
  const T c1 = T(1) - powers[0], c2 = T(1) - powers[1];
  T weight_norm = 0, update_norm = 0;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    m[i] += (a.g[i] - m[i]) * (T(1) - b1);
    v[i] += (a.g[i] * a.g[i] - v[i]) * (T(1) - b2);
    const T u = (m[i] / c1) / (std::sqrt(v[i] / c2) + eps) + wd * a.w[i];
    weight_norm += a.w[i] * a.w[i];
    update_norm += u * u;
  }
  const T trust = weight_norm > 0 && update_norm > 0
                      ? std::sqrt(weight_norm) / std::sqrt(update_norm)
                      : T(1);
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T u = (m[i] / c1) / (std::sqrt(v[i] / c2) + eps) + wd * a.w[i];
    a.w[i] -= a.lr * trust * u;
  }
  powers[0] *= b1;
  powers[1] *= b2;
}

template <class T>
inline void step_ftrl(const RuleStep<T>& a, T beta, T l1, T l2) {
  if (a.lr == 0) return;  // it divides by the rate, and a warm-up starts at 0
  T* n = a.s;
  T* z = a.s + a.d;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T grown = n[i] + a.g[i] * a.g[i];
    const T root = std::sqrt(grown);
    z[i] += a.g[i] - (root - std::sqrt(n[i])) / a.lr * a.w[i];
    n[i] = grown;
    const T size = std::fabs(z[i]);
    const T shrunk = z[i] < 0 ? -l1 - z[i] : l1 - z[i];
    a.w[i] = size <= l1 ? T(0) : a.lr * shrunk / (root + beta + l2 * a.lr);
  }
}

template <class T>
inline void step_group_ftrl(const RuleStep<T>& a, T beta, T l1, T l2) {
  if (a.lr == 0) return;  // it divides by the rate, and a warm-up starts at 0
  T* n = a.s;
  T* z = a.s + a.d;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T grown = n[i] + a.g[i] * a.g[i];
    z[i] += a.g[i] - (std::sqrt(grown) - std::sqrt(n[i])) / a.lr * a.w[i];
    n[i] = grown;
  }
  const T norm = std::sqrt(square_sum(z, a.d));
  const T keep = norm <= l1 ? T(0) : T(1) - l1 / norm;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T denominator = (std::sqrt(n[i]) + beta) / a.lr + l2;
    a.w[i] = keep == 0 ? T(0) : -z[i] * keep / denominator;
  }
}

template <class T>
inline void step_group_adagrad(const RuleStep<T>& a, T beta, T l2, T wd) {
  if (a.lr == 0) return;  // it divides by the rate, and a warm-up starts at 0
  T most = 0;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + wd * a.w[i];
    most = most > g * g ? most : g * g;
  }
  a.s[0] += most;
  const T rate = a.lr / (beta + std::sqrt(a.s[0]));
  T norm = 0;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T z = a.g[i] + wd * a.w[i] - a.w[i] / rate;
    norm += z * z;
  }
  norm = std::sqrt(norm);
  const T keep = norm < l2 || norm == 0 ? T(0) : (norm - l2) / norm;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T z = a.g[i] + wd * a.w[i] - a.w[i] / rate;
    a.w[i] = -rate * keep * z;
  }
}

template <class T>
inline void step_dynamic_wd_adagrad(const RuleStep<T>& a, T wd, T temperature, T decouple,
                                    T dynamic, T flip) {
  T decay = wd;
  if (dynamic != 0) {
    const T gap = std::sqrt(square_sum(a.g, a.d)) - std::sqrt(square_sum(a.w, a.d));
    const T gate = T(1) / (T(1) + std::exp(-gap / temperature));
    decay *= flip != 0 ? T(1) - gate : gate;
  }
  const T coupled = decouple != 0 ? T(0) : decay;
  const T decoupled = decouple != 0 ? a.lr * decay : T(0);
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + coupled * a.w[i];
    const T n = a.s[i] + g * g;
    a.s[i] = n;
    a.w[i] -= a.lr * g / std::sqrt(n) + decoupled * a.w[i];
  }
}

template <class T>
inline void step_rmsprop(const RuleStep<T>& a, T mu, T wd, T summed) {
  const T fresh = summed != 0 ? T(1) : T(1) - mu;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T g = a.g[i] + wd * a.w[i];
    const T n = mu * a.s[i] + fresh * g * g;
    a.s[i] = n;
    a.w[i] -= a.lr * g / (std::sqrt(n) + T(1));
  }
}

template <class T>
inline void step_batch_softmax(const RuleStep<T>& a) {
  constexpr std::int64_t kUnit = std::int64_t{1} << 20;
  const auto last = static_cast<std::int64_t>(a.s[0]) * kUnit + static_cast<std::int64_t>(a.s[1]);
  a.w[0] = (T(1) - a.lr) * a.w[0] + a.lr * static_cast<T>(a.global_step - last);
  a.s[0] = static_cast<T>(a.global_step / kUnit);
  a.s[1] = static_cast<T>(a.global_step % kUnit);
}

template <class T>
inline void step_sign_sgd(const RuleStep<T>& a, T wd) {
  const T keep = T(1) - a.lr * wd;
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) {
    const T sign = static_cast<T>((a.g[i] > 0) - (a.g[i] < 0));
    a.w[i] = a.w[i] * keep - a.lr * sign;
  }
}

template <class T>
inline void step_sgd(const RuleStep<T>& a, T wd) {
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) a.w[i] -= a.lr * (a.g[i] + wd * a.w[i]);
}

template <class T>
inline void step_moving_average(const RuleStep<T>& a, T mu) {
#pragma GCC ivdep
  for (int i = 0; i < a.d; ++i) a.w[i] = mu * a.w[i] + (T(1) - mu) * a.g[i];
}

template <class T>
using StepFunction = void (*)(const RuleStep<T>&);

template <class Step>
struct ParamCount;
template <class A, class... P>
struct ParamCount<void (*)(A, P...)> {
  static constexpr int value = sizeof...(P);
  static_assert(value <= kMostParams);
};

template <auto kStep, class T, int... i>
inline void step_with(const RuleStep<T>& a, std::integer_sequence<int, i...>) {
  kStep(a, a.params[i]...);
}

template <class T, auto kStep>
inline void take_step(const RuleStep<T>& a) {
  step_with<kStep>(a, std::make_integer_sequence<int, ParamCount<decltype(kStep)>::value>{});
}

// Calls visit(constant) with the rule's function as a constant, so that a loop over rows inlines it.
template <class T, class Visit>
void with_rule(RuleKind kind, const Visit& visit) {
#define SHOAL_RULE(name, ...) \
  case RuleKind::name:        \
    return visit(std::integral_constant<StepFunction<T>, take_step<T, &__VA_ARGS__>>{});
  switch (kind) { SHOAL_RULES(SHOAL_RULE) }
#undef SHOAL_RULE
}

struct RuleSignature {
  std::string_view name;
  RuleKind kind;
  int params;
};

// The rule of a name; nullptr if there is none.
inline const RuleSignature* find_rule(std::string_view name) {
  using T = float;
#define SHOAL_RULE(name, ...) {#name, RuleKind::name, ParamCount<decltype(&__VA_ARGS__)>::value},
  static constexpr RuleSignature kRules[] = {SHOAL_RULES(SHOAL_RULE)};
#undef SHOAL_RULE
  for (const RuleSignature& rule : kRules) {
    if (rule.name == name) return &rule;
  }
  return nullptr;
}

}  // namespace
}  // namespace shoal
