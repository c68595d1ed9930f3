// Trainers, readers, evictors and cuts on one shard. Run under the thread sanitizer by `make tsan`.
// All columns of a row always move together, so a reader that sees unequal columns saw half a step.
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "hash.h"
#include "shard.h"

namespace {

constexpr int kDim = 8;
constexpr int kBatch = 3000;
constexpr std::int64_t kRange = 20'000;

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

struct Batch {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> splits{0, kBatch};
  std::vector<std::int32_t> tables{0};
  explicit Batch(std::mt19937_64& random) : ids(kBatch) {
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % kRange);
  }
  shoal::Groups groups() const {
    return shoal::Groups{ids.data(), kBatch, splits.data(), tables.data(), 1};
  }
};

bool whole(const std::vector<float>& rows) {
  for (std::size_t i = 0; i < rows.size(); i += kDim) {
    for (int c = 1; c < kDim; ++c) {
      if (rows[i + c] != rows[i]) return false;
    }
  }
  return true;
}

void train(shoal::Shard& shard, int seed, int steps) {
  std::mt19937_64 random(seed);
  std::vector<float> rows(kBatch * kDim), grads(kBatch * kDim, 1.0F);
  for (int step = 0; step < steps; ++step) {
    const Batch batch(random);
    shoal::StepParams params;
    params.global_step = step;
    params.event_time_s = static_cast<std::uint32_t>(step);
    const auto ticket = shard.find_or_init(batch.groups(), nullptr, false, params, 2);
    void* out = rows.data();
    shard.gather(*ticket, shoal::GatherArgs{nullptr, nullptr, 0, nullptr, &out, step, 2});
    EXPECT(whole(rows));
    shoal::GradArgs record{ticket.get(), nullptr, nullptr, 0, nullptr, {grads.data()}, 1.0, {}};
    shard.apply(shoal::ApplyArgs{{&record}, {0.125}, params, 2});
    shard.end(*ticket);
  }
}

void read(shoal::Shard& shard, int seed, const std::atomic<bool>& stop) {
  std::mt19937_64 random(seed);
  std::vector<float> rows(kBatch * kDim);
  std::vector<std::uint8_t> found(kBatch);
  while (!stop.load()) {
    const Batch batch(random);
    void* out = rows.data();
    shard.find(batch.groups(), {out}, found.data(), 1);
    EXPECT(whole(rows));
  }
}

// A consumer of snapshots: ids and the version each had when it was read.
struct Copy {
  shoal::Cursor cursor;
  std::map<std::int64_t, std::int64_t> versions;

  void scan(shoal::Shard& shard) {
    const auto snapshot =
        shard.snapshot(cursor.version == 0 ? nullptr : &cursor, shoal::Snapshot::Options{});
    for (const std::int64_t id : snapshot->deleted(0)) versions.erase(id);
    const auto n = static_cast<std::size_t>(snapshot->find(0, 0, ~std::uint64_t{0}, 2));
    std::vector<std::int64_t> ids(n), stamps(n), seen(n), counts(n);
    std::vector<char> weights(n * kDim * 4 + 1), state(1);
    snapshot->read(shoal::RowColumns{ids.data(), stamps.data(), seen.data(), counts.data(),
                                     weights.data(), state.data()},
                   2);
    for (std::size_t i = 0; i < n; ++i) versions[ids[i]] = stamps[i];
    cursor = shoal::Cursor{shard.incarnation(), snapshot->version()};
    shard.close(*snapshot);
  }

  bool equals(const shoal::Exported& rows) const {
    bool same = rows.n == static_cast<std::int64_t>(versions.size());
    for (std::int64_t i = 0; i < rows.n && same; ++i) {
      const auto found = versions.find(rows.ids[i]);
      same = found != versions.end() && found->second == rows.versions[i];
    }
    return same;
  }
};

void all_at_once(shoal::TableSpec table, bool clears) {
  shoal::Shard shard({std::move(table)});
  std::atomic<bool> stop{false};
  std::vector<std::thread> trainers, others;
  for (int i = 0; i < 3; ++i) trainers.emplace_back([&, i] { train(shard, i, 40); });
  for (int i = 0; i < 3; ++i) others.emplace_back([&, i] { read(shard, 100 + i, stop); });
  others.emplace_back([&] {
    for (std::int64_t now = 0; !stop.load(); ++now) {
      shard.evict(now % 40);
      std::this_thread::yield();
    }
  });
  others.emplace_back([&] {
    while (!stop.load()) {
      shard.close_version();
      (void)shard.export_rows(0, nullptr);
      std::this_thread::yield();
    }
  });
  Copy copy;
  others.emplace_back([&] {
    while (!stop.load()) {
      copy.scan(shard);
      shard.release(copy.cursor.version, "reader");
    }
  });
  if (clears) {
    others.emplace_back([&] {
      while (!stop.load()) {
        try {
          shard.clear(0);
        } catch (const shoal::TicketStateError&) {  // a step is in flight, as it often is here
          std::this_thread::yield();
        }
      }
    });
  }
  for (auto& t : trainers) t.join();
  stop = true;
  for (auto& t : others) t.join();
  const std::size_t rows = shard.table(0).index().size();
  EXPECT(static_cast<std::size_t>(shard.export_rows(0, nullptr).n) == rows);
  copy.scan(shard);
  EXPECT(copy.equals(shard.export_rows(0, nullptr)));
  const std::int64_t capacity = shard.table(0).spec().capacity_rows;
  EXPECT(capacity == 0 || static_cast<std::int64_t>(rows) <= capacity);
  shard.evict(1'000'000);
  EXPECT(shard.table(0).index().size() == 0);
}

shoal::TableSpec limited() {
  shoal::TableSpec s = spec();
  s.capacity_rows = 12'000;
  s.on_full = shoal::OnFull::lru;
  s.admission.enabled = true;
  s.admission.required.otherwise = 2;
  return s;
}

}  // namespace

int main() {
  all_at_once(spec(), false);
  all_at_once(spec(), true);
  all_at_once(limited(), true);
  return failures;
}
