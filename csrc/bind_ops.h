#pragma once
// The distribution operations, bound one family a file. Addresses arrive checked by shoal.ops.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace shoal {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Sizes = std::vector<std::int64_t>;
using Release = nanobind::call_guard<nanobind::gil_scoped_release>;

template <class T>
T* at_address(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
std::vector<T*> all_at(const Addresses& addresses) {
  std::vector<T*> result;
  for (const Address address : addresses) result.push_back(at_address<T>(address));
  return result;
}

// How Python hands over an argument: a pointer as its address.
template <class T>
using Wire = std::conditional_t<std::is_pointer_v<T>, Address, T>;

// Binds a free function as it is: Wired<f>::call takes addresses where f takes pointers.
template <auto function>
struct Wired;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Wired<function> {
  static Result call(Wire<Arguments>... arguments) {
    return function(read<Arguments>(arguments)...);
  }

 private:
  template <class T>
  static T read(const Wire<T>& argument) {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(argument);
    } else {
      return argument;
    }
  }
};

void bind_ids_ops(nanobind::module_& m);
void bind_rows_ops(nanobind::module_& m);
void bind_segment_ops(nanobind::module_& m);
void bind_layout_ops(nanobind::module_& m);

}  // namespace shoal
