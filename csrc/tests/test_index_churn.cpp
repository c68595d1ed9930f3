// A set of fixed size under endless insert and erase: every line may come to have overflowed, and
// absent ids must still be told apart in bounded time.
#include <random>
#include <unordered_set>
#include <vector>

#include "expect.h"
#include "index.h"

namespace {

void churn(std::size_t live, int steps) {
  shoal::Index index(3);
  std::vector<std::int64_t> ids;
  std::mt19937_64 random(live);
  std::unordered_set<std::int64_t> present;
  for (int step = 0; step < steps; ++step) {
    if (ids.size() == live) {
      const std::size_t at = random() % live;
      EXPECT(index.erase(ids[at]) != shoal::kNoRow);
      present.erase(ids[at]);
      ids[at] = ids.back();
      ids.pop_back();
    }
    const auto id = static_cast<std::int64_t>(random());
    EXPECT(index.find(id) == shoal::kNoRow);
    EXPECT(index.erase(id) == shoal::kNoRow);
    index.insert(id, step);
    ids.push_back(id);
    present.insert(id);
  }
  EXPECT(index.size() == present.size());
  for (const std::int64_t id : ids) EXPECT(index.find(id) != shoal::kNoRow);
}

void room() {
  shoal::Index index(11);
  std::vector<std::int64_t> ids;
  for (std::int64_t id = 0; id < 100'000; ++id) ids.push_back(id * 7919);
  index.make_room(ids.data(), ids.size());
  const std::size_t slots = index.slots();
  for (const std::int64_t id : ids) index.insert(id, 1);
  EXPECT(index.slots() == slots);
}

}  // namespace

int main() {
  for (const std::size_t live : {16, 64, 128, 300}) churn(live, 300'000);
  room();
  return failures;
}
