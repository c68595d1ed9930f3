#pragma once
// The shard as Python holds it.
#include <cstdint>
#include <vector>

#include "bind.h"
#include "shard.h"

namespace shoal {

struct PyShard {
  Shard shard;
  explicit PyShard(std::vector<TableSpec> specs) : shard(std::move(specs)) {}
};

}  // namespace shoal
