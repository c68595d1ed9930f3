// Readers of several open snapshots beside trainers, an evictor, a loader and cuts. Run under the
// thread sanitizer by `make tsan`.
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "hash.h"
#include "shard.h"

namespace {

constexpr int kDim = 4;
constexpr int kBatch = 400;
constexpr std::int64_t kRange = 5'000;

shoal::TableSpec spec() {
  shoal::TableSpec s;
  s.name = "t";
  s.dim = kDim;
  s.salt = 42;
  s.key = shoal::mix64(42);
  shoal::Segment segment;
  segment.dim = kDim;
  segment.init.a = 0.5F;
  s.segments.push_back(segment);
  s.expires = true;
  s.ttl_s.otherwise = 3;
  return s;
}

void train(shoal::Shard& shard, std::mutex& hold, int seed, const std::atomic<bool>& stop) {
  std::mt19937_64 random(seed);
  std::vector<float> grads(kBatch * kDim, 1.0F);
  std::vector<std::int64_t> ids(kBatch), splits{0, kBatch};
  std::vector<std::int32_t> tables{0};
  for (int step = 0; !stop; ++step) {
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % kRange);
    const shoal::Groups groups{ids.data(), kBatch, splits.data(), tables.data(), 1};
    shoal::StepParams params;
    params.event_time_s = static_cast<std::uint32_t>(step);
    shoal::GradArgs record{nullptr, nullptr, nullptr, 0, nullptr, {grads.data()}, 1.0, {}};
    {
      const std::lock_guard guard(hold);
      shard.apply_ids(groups, nullptr, shoal::ApplyArgs{{&record}, {0.125}, params, 2});
    }
    if (step % 7 == 0) {
      const std::lock_guard guard(hold);
      shard.evict(step);
      shard.close_version();
    }
    std::this_thread::yield();
  }
}

// Few rows of low versions, as a restore brings them.
void load(shoal::Shard& shard, std::mutex& hold, const std::atomic<bool>& stop) {
  constexpr std::int64_t kRows = 50;
  std::vector<std::int64_t> ids(kRows), ones(kRows, 1), times(kRows, 1'000);
  std::vector<float> weights(kRows * kDim, 2.0F);
  for (std::int64_t turn = 0; !stop; ++turn) {
    for (std::int64_t i = 0; i < kRows; ++i) ids[i] = turn * 3 % kRange + i;
    {
      const std::lock_guard guard(hold);
      shard.load_rows(0,
                      kRows,
                      shoal::RowColumns{ids.data(), ones.data(), times.data(), ones.data(),
                                        reinterpret_cast<char*>(weights.data()), nullptr},
                      2);
    }
    std::this_thread::yield();
  }
}

void read(shoal::Shard& shard, shoal::Snapshot& snapshot, const shoal::Exported& want,
          std::uint64_t pieces) {
  std::int64_t at = 0;
  for (std::uint64_t k = 0; k < pieces; ++k) {
    const std::uint64_t width = ~std::uint64_t{0} / pieces;
    const std::uint64_t last = k + 1 == pieces ? ~std::uint64_t{0} : (k + 1) * width - 1;
    const auto n = static_cast<std::size_t>(snapshot.find(0, k * width, last, 2));
    std::vector<std::int64_t> ids(n), versions(n), seen(n), counts(n);
    std::vector<char> weights(n * kDim * 4 + 1), state(1);
    snapshot.read(shoal::RowColumns{ids.data(), versions.data(), seen.data(), counts.data(),
                                    weights.data(), state.data()},
                  2);
    for (std::size_t i = 0; i < n; ++i, ++at) {
      EXPECT(at < want.n && ids[i] == want.ids[at] && versions[i] == want.versions[at] &&
             seen[i] == want.seen[at] && counts[i] == want.counts[at]);
      EXPECT(std::memcmp(weights.data() + i * kDim * 4, want.weights.data() + at * kDim * 4,
                         kDim * 4) == 0);
    }
  }
  EXPECT(at == want.n);
  const std::vector<std::int64_t> bins = snapshot.histogram(0, 6, 2);
  std::int64_t total = 0;
  for (const std::int64_t bin : bins) total += bin;
  EXPECT(total == want.n);
  (void)shard;
}

void all_at_once(std::size_t buffer_bytes) {
  shoal::Shard shard({spec()});
  std::atomic<bool> stop{false};
  std::mutex hold;  // nothing changes between a snapshot point and the copy to compare with
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) others.emplace_back([&, i] { train(shard, hold, i, stop); });
  others.emplace_back([&] { load(shard, hold, stop); });
  std::int64_t copied = 0;
  struct Open {
    shoal::Exported want;
    std::shared_ptr<shoal::Snapshot> snapshot;
  };
  std::vector<Open> open;
  for (int turn = 0; turn < 14; ++turn) {
    {
      const std::lock_guard guard(hold);
      shoal::Exported want = shard.export_rows(0, nullptr);
      const shoal::Snapshot::Options options{buffer_bytes, 1000};
      open.push_back(Open{std::move(want), shard.snapshot(nullptr, options)});
    }
    if (open.size() < 3) continue;
    std::vector<std::thread> readers;
    for (const Open& one : open) {
      readers.emplace_back([&shard, &one] {
        for (std::uint64_t pieces = 1; pieces < 12; pieces += 5) {
          read(shard, *one.snapshot, one.want, pieces);
        }
      });
    }
    for (auto& t : readers) t.join();
    const auto closed = open.begin() + turn % 3;
    copied += closed->snapshot->stats().rows;
    shard.close(*closed->snapshot);
    open.erase(closed);
  }
  for (const Open& one : open) shard.close(*one.snapshot);
  EXPECT(copied > 0);
  stop = true;
  for (auto& t : others) t.join();
}

}  // namespace

int main() {
  all_at_once(std::size_t{64} << 20);
  all_at_once(std::size_t{32} << 10);
  return failures;
}
