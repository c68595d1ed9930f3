#pragma once
// The shard as Python holds it.
#include <cstdint>
#include <vector>

#include "shard.h"

namespace shoal {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

struct PyShard {
  Shard shard;
  explicit PyShard(std::vector<TableSpec> specs) : shard(std::move(specs)) {}
};

}  // namespace shoal
