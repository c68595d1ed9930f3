// The index against std::unordered_map under random inserts, erases and growth.
#include <random>
#include <unordered_map>
#include <vector>

#include "expect.h"
#include "index.h"

using shoal::Index;
using shoal::kNoRow;

namespace {

void churn(std::size_t steps, std::int64_t range) {
  Index index(0x1234567);
  std::unordered_map<std::int64_t, std::int32_t> model;
  std::mt19937_64 random(7);
  for (std::size_t step = 0; step < steps; ++step) {
    const auto id = static_cast<std::int64_t>(random() % range) - range / 2;
    const bool present = model.contains(id);
    EXPECT((index.find(id) != kNoRow) == present);
    if (!present) {
      const auto row = static_cast<std::int32_t>(step);
      index.insert(id, row);
      model[id] = row;
    } else if (random() % 3 == 0) {
      EXPECT(index.erase(id) == model[id]);
      model.erase(id);
    } else {
      EXPECT(index.find(id) == model[id]);
    }
    if (step % 1000 == 0) index.rebalance();
  }
  EXPECT(index.size() == model.size());
  for (const auto& [id, row] : model) EXPECT(index.find(id) == row);
}

void edges() {
  Index index(99);
  const std::int64_t ids[] = {INT64_MIN, INT64_MAX, -1, 0, 1};
  for (int i = 0; i < 5; ++i) index.insert(ids[i], i);
  for (int i = 0; i < 5; ++i) EXPECT(index.find(ids[i]) == i);
  EXPECT(index.erase(2) == kNoRow);
  index.clear();
  EXPECT(index.size() == 0 && index.find(0) == kNoRow);
}

void reserved() {
  Index index(5);
  index.reserve(1'000'000);
  const std::size_t slots = index.slots();
  for (std::int64_t id = 0; id < 1'000'000; ++id) index.insert(id, static_cast<std::int32_t>(id));
  EXPECT(index.slots() == slots);
  for (std::int64_t id = 0; id < 1'000'000; id += 17) EXPECT(index.find(id) == id);
}

}  // namespace

int main() {
  edges();
  churn(200'000, 500);
  churn(400'000, 300'000);
  reserved();
  return failures;
}
