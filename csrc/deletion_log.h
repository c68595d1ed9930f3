#pragma once
// Ids that lost their rows, in the order they did: (id, table, epoch), in memory and, beyond a bound,
// in unnamed temporary files. The shard's lock guards it: append and release exclude all else.
//
// A record of an id that has a row again is still here; who reads asks the index.
#include <cstdint>
#include <deque>
#include <vector>

#include "unnamed_file.h"

namespace shoal {

struct Deletion {
  std::int64_t id;
  std::int32_t table;
  std::uint32_t epoch;
};

class DeletionLog {
 public:
  bool open() const { return open_; }
  // True since memory or the file refused a record: readers must take everything anew.
  bool broken() const { return broken_; }
  // Every deletion after this epoch is here.
  std::uint32_t floor() const { return floor_; }

  void start(std::uint32_t floor);  // empties it
  void stop();
  void set_epoch(std::uint32_t epoch) { epoch_ = epoch; }  // what append() stamps; never falls
  void append(int table, std::int64_t id) noexcept;        // nothing while closed
  void release(std::uint32_t epoch);                       // drops records up to it
  // Number of the first record above an epoch.
  std::int64_t after(std::uint32_t epoch) const;
  // Copies records [first, first + n) that exist; throws std::runtime_error if the file fails.
  std::vector<Deletion> read(std::int64_t first, std::int64_t n) const;

 private:
  static constexpr std::size_t kInMemory = std::size_t{1} << 16;
  static constexpr std::int64_t kInFile = std::int64_t{1} << 22;
  struct Mark {
    std::uint32_t epoch;
    std::int64_t first;  // the epoch's first record
  };
  // A file goes when all of it is released.
  struct Spilled {
    UnnamedFile file;
    std::int64_t first, n;
  };

  void spill();
  void empty();

  bool open_ = false, broken_ = false;
  std::uint32_t epoch_ = 1, floor_ = 0;
  std::int64_t first_ = 0;    // number of the oldest record kept
  std::int64_t tail_at_ = 0;  // number of the first record in memory
  std::deque<Mark> marks_;
  std::vector<Deletion> tail_;
  std::deque<Spilled> files_;
};

}  // namespace shoal
