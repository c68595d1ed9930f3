#pragma once
// The shard: K tables, one lock, the verbs. Row state has no other owner.
//
// Ids travel in groups: group g is ids[splits[g] .. splits[g+1]) of table tables[g].
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#include "kernels.h"
#include "threads.h"
#include "scratch.h"
#include "snapshot.h"
#include "table.h"

namespace shoal {

class Shard;
struct TableWork;
struct Part;

struct Groups {
  const std::int64_t* ids;
  std::int64_t n;
  const std::int64_t* splits;
  const std::int32_t* tables;
  int count;
};

// Frozen description of a pooled lookup, compiled once.
struct Plan {
  std::vector<PlanSlice> slices;
  std::vector<PoolSpec> pools;  // one per group; slices point into `slices`
  std::vector<std::int64_t> widths;
  bool adds = false;            // some slice sums into what another group wrote
};

// Rows of one lookup; ends with this at the latest.
struct Ticket {
  Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket();

  Shard* shard = nullptr;  // which it belongs to
  std::vector<std::int32_t> rows;
  std::unique_ptr<std::int64_t[]> ids;  // at the positions that had no row when looked up
  std::vector<std::int64_t> splits;
  std::vector<std::int32_t> tables;
  std::vector<std::int64_t> counts;  // empty: 1 each
  std::vector<std::int64_t> missing; // positions that had no row when looked up
  std::uint32_t event_time_s = 0;
  std::atomic<bool> live{false};

  Groups groups() const {
    return Groups{ids.get(), static_cast<std::int64_t>(rows.size()), splits.data(), tables.data(),
                  static_cast<int>(tables.size())};
  }
};

struct GatherArgs {
  const Plan* plan;             // null: one output per group, rows as they are
  const std::int64_t* offsets;  // [G * B + 1], group-major; null without a plan
  std::int64_t bags;
  const float* weights;
  void* const* outputs;
  std::int64_t global_step;
  int threads;
};

struct GradArgs {
  Ticket* ticket;
  const Plan* plan;
  const std::int64_t* offsets;
  std::int64_t bags;
  const float* weights;
  std::vector<void*> grads;
  double scale;
  std::vector<void*> seen;  // per group, or none
};

struct ApplyArgs {
  std::vector<GradArgs*> records;
  std::vector<double> lrs;                // per table, per segment, in order
  StepParams step;
  int threads;
};

struct Sums {
  int table;
  std::vector<std::int64_t> ids, counts;
  std::vector<char> sums;
};

struct NonFiniteError : std::runtime_error {
  NonFiniteError() : std::runtime_error("a row's gradient is not finite") {}
};

// A ticket was used after its end, or a table was to be cleared under one.
struct TicketStateError : std::runtime_error {
  TicketStateError() : std::runtime_error("a ticket is not in the state needed") {}
};

// Rows of one table, copied out under the lock.
struct Exported {
  std::int64_t n = 0;
  std::vector<std::int64_t> ids, versions, seen, counts;
  std::vector<char> weights, state;

  RowColumns columns() {
    return {ids.data(), versions.data(), seen.data(), counts.data(), weights.data(), state.data()};
  }
};

// What a consumer holds: all rows stamped up to `version` in this life of the shard.
struct Cursor {
  std::int64_t incarnation = 0;
  std::uint32_t version = 0;
};

std::int64_t new_incarnation();  // random, in [1, 2^63)

class Shard {
 public:
  explicit Shard(std::vector<TableSpec> specs);

  int size() const { return static_cast<int>(tables_.size()); }
  const Table& table(int t) const { return tables_[t]; }
  Table& table(int t) { return tables_[t]; }
  FairLock& lock() { return lock_; }
  const DeletionLog& deletions() const { return deletions_; }  // under lock()
  std::uint32_t version() const { return version_; }
  std::uint32_t close_version();

  // Rows of unpooled fp32/fp64 tables in one pass; other tables through the general path.
  void find(const Groups& groups, const std::vector<void*>& outputs, std::uint8_t* found,
            int threads);
  void find_pooled(const Groups& groups, GatherArgs args);
  std::unique_ptr<Ticket> find_or_init(const Groups& groups, const std::int64_t* counts,
                                       bool admit_all, StepParams step, int threads);
  void gather(const Ticket& ticket, const GatherArgs& args);
  void apply(const ApplyArgs& args);
  std::vector<Sums> sum(const std::vector<GradArgs*>& records);
  // One step for ids that need no ticket; admission applies to those without a row.
  void apply_ids(const Groups& groups, const std::int64_t* counts, ApplyArgs args);

  enum class Write { assign, add, reinitialize };
  void write(const Groups& groups, Write mode, const void* const* values, std::int32_t* status,
             StepParams step, int threads);

  Exported export_rows(int t, const std::int64_t* only);  // `only`: one id, or null for all
  void load_rows(int t, std::int64_t n, const RowColumns& rows, int threads);
  void expect(int t, std::int64_t rows);  // so many in all: memory for them, not yet touched

  // No cursor of this consumer starts below the version any more; deletions that no consumer wants go.
  void release(std::uint32_t version, const std::string& consumer);
  void leave(const std::string& consumer);  // it wants none; the last one ends the log
  std::int64_t incarnation();

  // A point whose rows are kept as they are at it until close(); rows and deletions after
  // `since->version`, or all rows. The first one opens the log of deletions; OpenSnapshots::kMost may be
  // open at once. Throws SnapshotRefused.
  std::shared_ptr<Snapshot> snapshot(const Cursor* since, Snapshot::Options options);
  void close(const Snapshot& snapshot);
  // Closes the versions up to this one; throws std::invalid_argument where a row's is above it.
  Cursor resume(std::uint32_t version);

  std::int64_t evict(std::int64_t now_s);
  // Drops rows, but those that a ticket holds; how many.
  std::int64_t remove(const Groups& groups);
  void end(Ticket& ticket);
  void clear(int t);
  bool pinned_table(int t) const;
  std::int64_t last_step() const { return last_step_; }
  void set_last_step(std::int64_t step) { last_step_ = step; }

 private:
  std::vector<bool> pinned(int t) const;
  void probe(const Groups& groups, std::int32_t* rows, std::int64_t* absent, int threads) const;
  void insert_missing(Ticket& ticket, bool probed, bool admit_all, StepParams step, int threads);
  std::unique_ptr<Ticket> open(const Groups& groups, const std::int64_t* counts,
                               StepParams step);
  void gather_rows(const Groups& groups, const std::int32_t* rows, bool absent_is_zero,
                   const GatherArgs& args) const;
  // unsure: sums may overflow, so they are formed once before a row changes.
  void apply_locked(const ApplyArgs& args, bool unsure);
  bool sums_finite(const std::vector<TableWork>& works, const std::vector<Part>& parts,
                   int threads);
  void check_versions() const;
  void next_version();
  void release_log(std::uint32_t version);
  void restart_log(std::uint32_t floor);  // empties it, which open snapshots may still need

  std::vector<Table> tables_;
  std::uint32_t version_ = 1;
  std::int64_t incarnation_;  // new whenever cursors of before can no longer be served
  DeletionLog deletions_;
  OpenSnapshots open_;
  std::vector<std::shared_ptr<Snapshot>> snapshots_;  // those that are open, oldest first
  std::atomic<std::int64_t> last_step_{0};     // reads without a step of their own use it (OneBit's scale)
  std::uint64_t membership_ = 0;  // counts changes of which ids have rows
  FairLock lock_;
  mutable FairLock tickets_mutex_;
  std::unordered_set<Ticket*> tickets_;
  ItemLists lists_;                // scratch of apply and sum, guarded by the write lock
  std::vector<PartScratch> scratch_;  // one a lane
};

}  // namespace shoal
