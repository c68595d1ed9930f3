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

void Shard::release(std::uint32_t epoch) {
  const WriteGuard guard(lock_);
  const std::uint32_t closed = std::min(epoch, epoch_ - 1);
  if (snapshot_ && closed > snapshot_->since()) snapshot_->take_log();
  deletions_.release(closed);
}

void Shard::stop_log() {
  const WriteGuard guard(lock_);
  if (snapshot_) snapshot_->take_log();
  deletions_.stop();
}

std::shared_ptr<Snapshot> Shard::snapshot(const Cursor* since, Snapshot::Options options) {
  const WriteGuard guard(lock_);
  if (snapshot_) throw SnapshotRefused(SnapshotRefused::Why::open);
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
  auto snapshot = std::make_shared<Snapshot>(*this, from, epoch_, log, options);
  if (!kept) {
    // Deletions of before are not known, so that cursors of before are worth nothing.
    incarnation_ = new_incarnation();
    deletions_.start(epoch_);
  }
  deletions_.set_epoch(++epoch_);
  snapshot_ = snapshot;
  for (Table& table : tables_) table.keep_in(&snapshot_->images());
  return snapshot;
}

void Shard::close(const Snapshot& snapshot) {
  std::shared_ptr<Snapshot> closed;  // dies without the lock: its thread may be writing
  if (lock_.broken()) return;
  const WriteGuard guard(lock_);
  if (snapshot_.get() != &snapshot) return;
  for (Table& table : tables_) table.keep_in(nullptr);
  closed = std::move(snapshot_);
  snapshot_.reset();
}

void Shard::restart_log(std::uint32_t floor) {
  if (snapshot_) snapshot_->take_log();
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
