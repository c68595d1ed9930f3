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
void Shard::release_log(std::uint32_t epoch) {
  for (const std::shared_ptr<Snapshot>& one : snapshots_) {
    if (epoch > one->since()) one->take_log();
  }
  deletions_.release(epoch);
}

void Shard::release(std::uint32_t epoch, const std::string& consumer) {
  const WriteGuard guard(lock_);
  release_log(deletions_.hold(consumer, std::min(epoch, epoch_ - 1)));
}

void Shard::leave(const std::string& consumer) {
  const WriteGuard guard(lock_);
  if (const auto epoch = deletions_.leave(consumer)) return release_log(*epoch);
  for (const std::shared_ptr<Snapshot>& one : snapshots_) one->take_log();
  deletions_.stop();
}

std::shared_ptr<Snapshot> Shard::snapshot(const Cursor* since, Snapshot::Options options) {
  const WriteGuard guard(lock_);
  if (open_.full()) throw SnapshotRefused(SnapshotRefused::Why::full);
  const bool kept = deletions_.open() && !deletions_.broken();
  std::uint32_t from = 0;
  if (since != nullptr) {
    if (since->incarnation != incarnation_) {
      throw SnapshotRefused(SnapshotRefused::Why::incarnation);
    }
    if (!kept || since->epoch < deletions_.floor() || since->epoch >= epoch_) {
      throw SnapshotRefused(SnapshotRefused::Why::forgotten);
    }
    from = since->epoch;
  }
  check_epochs();
  Snapshot::LogSpan log;
  if (since != nullptr) log = Snapshot::LogSpan{deletions_.after(from), deletions_.after(epoch_)};
  auto snapshot = std::make_shared<Snapshot>(*this, from, epoch_, log, options, open_);
  if (!kept) {
    // Deletions of before are not known, so that cursors of before are worth nothing.
    incarnation_ = new_incarnation();
    restart_log(epoch_);
  }
  snapshots_.reserve(snapshots_.size() + 1);
  open_.open(snapshot->kept());
  snapshots_.push_back(snapshot);
  close_epoch();
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
void Shard::close_epoch() {
  if (const auto most = deletions_.excess()) release_log(*most);
  deletions_.set_epoch(++epoch_);
}

void Shard::restart_log(std::uint32_t floor) {
  for (const std::shared_ptr<Snapshot>& one : snapshots_) one->take_log();
  deletions_.start(floor);
}

Cursor Shard::resume(std::uint32_t epoch) {
  const WriteGuard guard(lock_);
  for (const Table& table : tables_) {
    if (table.arena().latest() > epoch) throw std::invalid_argument("epoch");
  }
  incarnation_ = new_incarnation();
  epoch_ = std::max(epoch_, epoch + 1);
  restart_log(epoch);
  deletions_.set_epoch(epoch_);
  return Cursor{incarnation_, epoch};
}

}  // namespace shoal
