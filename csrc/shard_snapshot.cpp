// Shard: cuts that keep what lies before them.
#include <algorithm>
#include <random>
#include <stdexcept>

#include "shard.h"

namespace shoal {

std::int64_t new_incarnation() {
  std::random_device source;
  std::uint64_t drawn = 0;
  while (drawn == 0) {
    drawn = ((std::uint64_t{source()} << 32) | source()) >> 1;
  }
  return static_cast<std::int64_t>(drawn);
}

std::int64_t Shard::incarnation() {
  const ReadGuard guard(lock_);
  return incarnation_;
}

// Open snapshots copy what they have not read of the log yet, as far as it is about to go.
void Shard::release_log(std::uint32_t version) {
  for (const std::shared_ptr<Snapshot>& one : snapshots_) {
    if (version > one->since()) one->take_log();
  }
  deletions_.release(version);
}

void Shard::release(std::uint32_t version, const std::string& consumer) {
  const WriteGuard guard(lock_);
  release_log(deletions_.hold(consumer, std::min(version, version_ - 1)));
}

void Shard::leave(const std::string& consumer) {
  const WriteGuard guard(lock_);
  if (const auto version = deletions_.leave(consumer)) return release_log(*version);
  for (const std::shared_ptr<Snapshot>& one : snapshots_) one->take_log();
  deletions_.stop();
}

std::shared_ptr<Snapshot> Shard::snapshot(const Cursor* since, Snapshot::Options options) {
  const WriteGuard guard(lock_);
  if (open_.full()) throw SnapshotRefused("full");
  const bool kept = deletions_.open() && !deletions_.broken();
  std::uint32_t from = 0;
  if (since != nullptr) {
    if (since->incarnation != incarnation_) throw SnapshotRefused("incarnation");
    if (!kept || since->version < deletions_.floor() || since->version >= version_) {
      throw SnapshotRefused("forgotten");
    }
    from = since->version;
  }
  check_versions();
  Snapshot::LogSpan log;
  if (since != nullptr) log = Snapshot::LogSpan{deletions_.after(from), deletions_.after(version_)};
  auto snapshot = std::make_shared<Snapshot>(*this, from, version_, log, options, open_);
  if (!kept) {
    // Deletions of before are not known, so that cursors of before are worth nothing.
    incarnation_ = new_incarnation();
    restart_log(version_);
  }
  snapshots_.reserve(snapshots_.size() + 1);
  open_.open(snapshot->kept());
  snapshots_.push_back(snapshot);
  next_version();
  for (Table& table : tables_) table.keep_in(&open_);
  return snapshot;
}

void Shard::close(const Snapshot& snapshot) {
  std::shared_ptr<Snapshot> closed;  // dies without the lock: its thread may be writing
  if (lock_.broken()) return;
  const WriteGuard guard(lock_);
  if (!open_.close(*snapshot.kept())) return;
  if (open_.empty()) {
    for (Table& table : tables_) table.keep_in(nullptr);
  }
  const auto at = std::find_if(snapshots_.begin(), snapshots_.end(),
                               [&](const auto& one) { return one.get() == &snapshot; });
  closed = std::move(*at);
  snapshots_.erase(at);
}

// Of a consumer that does not come any more, there are deletions up to a bound.
void Shard::next_version() {
  if (const auto most = deletions_.excess()) release_log(*most);
  deletions_.set_version(++version_);
}

void Shard::restart_log(std::uint32_t floor) {
  for (const std::shared_ptr<Snapshot>& one : snapshots_) one->take_log();
  deletions_.start(floor);
}

Cursor Shard::resume(std::uint32_t version) {
  const WriteGuard guard(lock_);
  for (const Table& table : tables_) {
    if (table.arena().latest() > version) throw std::invalid_argument("version");
  }
  incarnation_ = new_incarnation();
  version_ = std::max(version_, version + 1);
  restart_log(version);
  deletions_.set_version(version_);
  return Cursor{incarnation_, version};
}

}  // namespace shoal
