#pragma once
// What the files that bind the core to Python share. Tensors arrive as addresses that Python has
// checked.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffers.h"
#include "layout.h"

namespace shoal {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Sizes = std::vector<std::int64_t>;
using Release = nanobind::call_guard<nanobind::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
std::vector<T*> all_at(const Addresses& addresses) {
  std::vector<T*> result(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) result[i] = at<T>(addresses[i]);
  return result;
}

// As shoal.table.rows.pointers orders them.
inline RowColumns columns_at(const Addresses& a) {
  return {at<std::int64_t>(a[0]), at<std::int64_t>(a[1]), at<std::int64_t>(a[2]),
          at<std::int64_t>(a[3]), at<char>(a[4]),         at<char>(a[5])};
}

// How Python hands over an argument: a pointer as its address, an enum as its number.
template <class T>
struct Wire {
  using Type = T;
  static const T& read(const T& given) { return given; }
};
template <class T>
struct Wire<T*> {
  using Type = Address;
  static T* read(Address given) { return at<T>(given); }
};
template <class T>
struct Wire<const std::vector<T*>&> {
  using Type = const Addresses&;
  static std::vector<T*> read(const Addresses& given) { return all_at<T>(given); }
};
template <class T>
struct Wire<const T&> {
  using Type = const T&;
  static const T& read(const T& given) { return given; }
};
template <class T>
  requires std::is_enum_v<T>
struct Wire<T> {
  using Type = int;
  static T read(int given) { return static_cast<T>(given); }
};
template <>
struct Wire<const RowColumns&> {
  using Type = const Addresses&;
  static RowColumns read(const Addresses& given) { return columns_at(given); }
};

// Binds a function or a method as it is: Wired<f>::call takes arguments as Python hands them over.
template <auto function>
struct Wired;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Wired<function> {
  static Result call(typename Wire<Arguments>::Type... arguments) {
    return function(Wire<Arguments>::read(arguments)...);
  }
};
template <class Result, class Self, class... Arguments, Result (Self::*method)(Arguments...)>
struct Wired<method> {
  static Result call(Self& self, typename Wire<Arguments>::Type... arguments) {
    return (self.*method)(Wire<Arguments>::read(arguments)...);
  }
};

// A torch tensor over pooled memory, which returns to the pool with the tensor.
template <class T, class... Size>
nanobind::ndarray<nanobind::pytorch, T> pooled(Size... shape) {
  auto* block = new Block(Buffers::instance().take((shape * ... * sizeof(T))));
  const nanobind::capsule owner(block, [](void* p) noexcept {
    auto* returned = static_cast<Block*>(p);
    Buffers::instance().give_back(std::move(*returned));
    delete returned;
  });
  return nanobind::ndarray<nanobind::pytorch, T>(block->data(), {shape...}, owner);
}

class Shard;

void bind_checksums(nanobind::module_& m);
void bind_launch(nanobind::module_& m);
void bind_row_images(nanobind::module_& m);
void bind_shared_memory(nanobind::module_& m);
void bind_snapshot(nanobind::module_& m, nanobind::class_<Shard>& shard);
void bind_ids_ops(nanobind::module_& m);
void bind_rows_ops(nanobind::module_& m);
void bind_segment_ops(nanobind::module_& m);
void bind_layout_ops(nanobind::module_& m);

}  // namespace shoal
