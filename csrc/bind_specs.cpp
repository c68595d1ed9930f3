#include "bind_specs.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>

#include "hash.h"

namespace nb = nanobind;

namespace shoal {
namespace {

template <class T>
T get(const nb::dict& d, const char* key) {
  return nb::cast<T>(d[key]);
}

template <class T>
T named(const std::map<std::string, T>& names, const std::string& name) {
  const auto found = names.find(name);
  if (found == names.end()) throw std::invalid_argument("the core does not know " + name);
  return found->second;
}

RuleKind rule_kind(const std::string& name) {
  static const std::map<std::string, RuleKind> names = {
      {"sgd", RuleKind::sgd},
      {"momentum", RuleKind::momentum},
      {"adagrad", RuleKind::adagrad},
      {"rowwise_adagrad", RuleKind::rowwise_adagrad},
      {"adadelta", RuleKind::adadelta},
      {"adam", RuleKind::adam},
      {"adamw", RuleKind::adamw},
      {"amsgrad", RuleKind::amsgrad},
      {"ftrl", RuleKind::ftrl},
      {"group_ftrl", RuleKind::group_ftrl},
      {"group_adagrad", RuleKind::group_adagrad},
      {"dynamic_wd_adagrad", RuleKind::dynamic_wd_adagrad},
      {"rmsprop", RuleKind::rmsprop},
      {"moving_average", RuleKind::moving_average},
      {"batch_softmax", RuleKind::batch_softmax},
      {"sign_sgd", RuleKind::sign_sgd},
      {"lamb", RuleKind::lamb},
  };
  return named(names, name);
}

RuleParams rule_from(const nb::dict& d) {
  RuleParams p;
  p.kind = rule_kind(get<std::string>(d, "kind"));
  const std::map<std::string, double*> numbers = {
      {"momentum", &p.momentum}, {"beta", &p.beta},
      {"beta1", &p.beta1},       {"beta2", &p.beta2},
      {"eps", &p.eps},           {"weight_decay", &p.weight_decay},
      {"l1", &p.l1},             {"initial_accumulator", &p.initial_accumulator},
      {"l2", &p.l2},             {"rho", &p.rho},
      {"strength", &p.strength}, {"temperature", &p.temperature},
  };
  const std::map<std::string, bool*> flags = {
      {"nesterov", &p.nesterov}, {"decouple", &p.decouple},
      {"dynamic", &p.dynamic},   {"flip", &p.flip},
      {"sum", &p.sum},           {"delay_compensated", &p.delay_compensated},
  };
  for (const auto& [key, value] : nb::cast<nb::dict>(d["params"])) {
    const auto name = nb::cast<std::string>(key);
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = nb::cast<double>(value) != 0;
    } else {
      *named(numbers, name) = nb::cast<double>(value);
    }
  }
  return p;
}

PerSlot per_slot_from(const nb::dict& d) {
  PerSlot p;
  p.otherwise = get<std::int64_t>(d, "otherwise");
  p.shift = get<int>(d, "shift");
  p.mask = get<std::uint32_t>(d, "mask");
  p.values = get<std::vector<std::pair<std::uint32_t, std::int64_t>>>(d, "values");
  return p;
}

Segment segment_from(const nb::dict& d) {
  static const std::map<std::string, InitKind> inits = {
      {"constant", InitKind::constant},
      {"uniform", InitKind::uniform},
      {"normal", InitKind::normal},
      {"truncated_normal", InitKind::truncated_normal},
  };
  static const std::map<std::string, RetrieverKind> retrievers = {
      {"float32", RetrieverKind::identity},
      {"float16", RetrieverKind::identity},
      {"fixed_r8", RetrieverKind::fixed_r8},
      {"one_bit", RetrieverKind::one_bit},
  };
  Segment s;
  s.column = get<int>(d, "column");
  s.dim = get<int>(d, "dim");
  s.state_column = get<int>(d, "state_column");
  s.state_width = get<int>(d, "state_width");
  s.rule = rule_from(nb::cast<nb::dict>(d["rule"]));
  s.init.kind = named(inits, get<std::string>(d, "init"));
  s.init.a = get<float>(d, "init_a");
  s.init.b = get<float>(d, "init_b");
  s.retriever.kind = named(retrievers, get<std::string>(d, "retriever"));
  const std::map<std::string, double*> numbers = {
      {"r", &s.retriever.r},
      {"step_size", &s.retriever.step_size},
      {"init_scale", &s.retriever.init_scale},
      {"max_scale", &s.retriever.max_scale},
      {"amplitude", &s.retriever.amplitude},
  };
  for (const auto& [key, value] : nb::cast<nb::dict>(d["retriever_params"])) {
    *named(numbers, nb::cast<std::string>(key)) = nb::cast<double>(value);
  }
  return s;
}

}  // namespace

TableSpec table_from(const nb::dict& d) {
  static const std::map<std::string, DType> dtypes = {{"float32", DType::f32},
                                                      {"float16", DType::f16},
                                                      {"bfloat16", DType::bf16},
                                                      {"float64", DType::f64}};
  static const std::map<std::string, OnFull> policies = {
      {"raise", OnFull::raise}, {"lru", OnFull::lru}, {"lfu", OnFull::lfu}};
  TableSpec t;
  t.name = get<std::string>(d, "name");
  t.dim = get<int>(d, "dim");
  t.state_width = get<int>(d, "state_width");
  t.dtype = named(dtypes, get<std::string>(d, "dtype"));
  for (const auto segment : d["segments"]) {
    t.segments.push_back(segment_from(nb::cast<nb::dict>(segment)));
  }
  t.salt = get<std::uint64_t>(d, "salt");
  t.key = mix64(get<std::uint64_t>(d, "seed") ^ t.salt);
  t.first_column = get<int>(d, "first_column");
  t.capacity_rows = get<std::int64_t>(d, "capacity_rows");
  t.on_full = named(policies, get<std::string>(d, "on_full"));
  t.expected_rows = get<std::int64_t>(d, "expected_rows");
  if (!d["admission"].is_none()) {
    const auto admission = nb::cast<nb::dict>(d["admission"]);
    t.admission.enabled = true;
    t.admission.sketch = get<bool>(admission, "sketch");
    t.admission.required = per_slot_from(nb::cast<nb::dict>(admission["required"]));
    t.admission.width = get<std::uint64_t>(admission, "width");
    t.admission.depth = get<int>(admission, "depth");
  }
  if (!d["ttl_s"].is_none()) {
    t.expires = true;
    t.ttl_s = per_slot_from(nb::cast<nb::dict>(d["ttl_s"]));
  }
  return t;
}

Plan plan_from(const PlanFeature* features, std::int64_t n_features, const PlanSlice* slices,
               std::int64_t n_slices, std::vector<std::int64_t> widths) {
  Plan plan;
  plan.widths = std::move(widths);
  plan.slices.assign(slices, slices + n_slices);
  for (std::int64_t f = 0; f < n_features; ++f) {
    plan.pools.push_back(PoolSpec{features[f].pooling, features[f].length,
                                  plan.slices.data() + features[f].first,
                                  features[f].last - features[f].first});
  }
  for (const PlanSlice& slice : plan.slices) plan.adds = plan.adds || slice.adds();
  return plan;
}

}  // namespace shoal
