#include "bind_specs.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

#include "hash.h"
#include "rules_impl.h"

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

// A rule's numbers, as many as it declares.
std::vector<double> numbers(const nb::dict& d, const char* key, std::size_t count,
                            const std::string& rule) {
  auto found = get<std::vector<double>>(d, key);
  if (found.size() != count) {
    throw std::invalid_argument("parameters of " + rule + ": " + std::to_string(found.size()) +
                                ", the core reads " + std::to_string(count));
  }
  return found;
}

RuleParams rule_from(const nb::dict& d) {
  const auto name = get<std::string>(d, "rule");
  const RuleSignature* rule = find_rule(name);
  if (rule == nullptr) throw std::invalid_argument("the core does not know " + name);
  RuleParams p;
  p.kind = rule->kind;
  const auto params = numbers(d, "rule_params", static_cast<std::size_t>(rule->params), name);
  std::copy(params.begin(), params.end(), p.params);
  p.delay_compensated = !d["strength"].is_none();
  if (p.delay_compensated) p.strength = get<double>(d, "strength");
  return p;
}

InitParams init_from(const nb::dict& d) {
  static const std::map<std::string, std::pair<InitKind, std::size_t>> laws = {
      {"constant", {InitKind::constant, 1}},
      {"uniform", {InitKind::uniform, 2}},
      {"normal", {InitKind::normal, 2}},
      {"truncated_normal", {InitKind::truncated_normal, 2}},
  };
  const auto name = get<std::string>(d, "law");
  const auto& [kind, count] = named(laws, name);
  const auto params = numbers(d, "law_params", count, name);
  return InitParams{kind, static_cast<float>(params[0]),
                    count > 1 ? static_cast<float>(params[1]) : 0.0F};
}

RetrieverParams retriever_from(const nb::dict& d) {
  using P = RetrieverParams;
  static const std::map<std::string, std::pair<RetrieverKind, std::vector<double P::*>>> known = {
      {"float32", {RetrieverKind::identity, {}}},
      {"float16", {RetrieverKind::identity, {}}},
      {"fixed_r8", {RetrieverKind::fixed_r8, {&P::r}}},
      {"one_bit",
       {RetrieverKind::one_bit, {&P::step_size, &P::init_scale, &P::max_scale, &P::amplitude}}},
  };
  const auto name = get<std::string>(d, "retriever");
  const auto& [kind, fields] = named(known, name);
  const auto params = numbers(d, "retriever_params", fields.size(), name);
  RetrieverParams p;
  p.kind = kind;
  for (std::size_t i = 0; i < fields.size(); ++i) p.*fields[i] = params[i];
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
  return Segment{get<int>(d, "column"), get<int>(d, "dim"), get<int>(d, "state_column"),
                 rule_from(d),          init_from(d),       retriever_from(d)};
}

}  // namespace

TableSpec table_from(const nb::dict& d) {
  static const std::map<std::string, DType> dtypes = {{"float32", DType::f32},
                                                      {"float16", DType::f16},
                                                      {"bfloat16", DType::bf16},
                                                      {"float64", DType::f64},
                                                      {"int8", DType::i8}};
  static const std::map<std::string, OnFull> policies = {
      {"raise", OnFull::raise}, {"lru", OnFull::lru}, {"lfu", OnFull::lfu}};
  TableSpec t;
  t.name = get<std::string>(d, "name");
  t.dim = get<int>(d, "dim");
  t.state = get<std::vector<double>>(d, "state");
  t.state_width = static_cast<int>(t.state.size());
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
               std::int64_t n_slices, const std::vector<std::int64_t>& widths) {
  Plan plan;
  plan.widths = widths;
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
