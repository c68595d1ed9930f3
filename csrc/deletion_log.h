#pragma once
// Ids that lost their rows, in the order they did: (id, table, version), in memory and, beyond a bound,
// in unnamed temporary files. The shard's lock guards it: append and release exclude all else.
//
// A record of an id that has a row again is still here; who reads asks the index.
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "unnamed_file.h"

namespace shoal {

// As GPU kernels write it, too (shoal/kernels/row_changes.py).
struct Deletion {
  std::int64_t id;
  std::uint32_t version;
  std::uint32_t table;
};

class DeletionLog {
 public:
  // Records in memory, in one file, and in all: excess() asks for fewer where there are more.
  explicit DeletionLog(std::size_t in_memory = std::size_t{1} << 16,
                       std::int64_t in_file = std::int64_t{1} << 22,
                       std::int64_t most = std::int64_t{1} << 28)
      : in_memory_(in_memory), in_file_(in_file), most_(most) {}
  DeletionLog(const DeletionLog&) = delete;

  bool open() const { return open_; }
  // True since memory or the file refused a record: readers must take everything anew.
  bool broken() const { return broken_; }
  // Every deletion after this version is here.
  std::uint32_t floor() const { return floor_; }

  void start(std::uint32_t floor);  // empties it
  void stop();
  void set_version(std::uint32_t version) { version_ = version; }  // what append() stamps; never falls
  void append(int table, std::int64_t id) noexcept;        // nothing while closed
  void append(const Deletion* records, std::size_t n) noexcept;  // whose versions never fall
  // Drops records up to it, and forgets consumers that still want some of them.
  void release(std::uint32_t version);
  // A consumer has what happened up to the version, and is known from now on; returns the version that
  // all known ones have passed, for release().
  std::uint32_t hold(const std::string& consumer, std::uint32_t version);
  // A consumer wants no more; none: it was the last one.
  std::optional<std::uint32_t> leave(const std::string& consumer);
  // Up to which version to release records, since there are too many; none: there are not.
  std::optional<std::uint32_t> excess() const;
  // Number of the first record above a version.
  std::int64_t after(std::uint32_t version) const;
  // Copies records [first, first + n) that exist; throws std::runtime_error if the file fails.
  std::vector<Deletion> read(std::int64_t first, std::int64_t n) const;

 private:
  struct Mark {
    std::uint32_t version;
    std::int64_t first;  // the version's first record
  };
  // A file goes when all of it is released.
  struct Spilled {
    UnnamedFile file;
    std::int64_t first, n;
  };

  std::uint32_t passed() const;  // by all consumers; there are some
  void push(const Deletion& record);
  void spill();
  void empty();

  std::size_t in_memory_;
  std::int64_t in_file_, most_;
  std::map<std::string, std::uint32_t> held_;  // by consumer: the version it has passed
  bool open_ = false, broken_ = false;
  std::uint32_t version_ = 1, floor_ = 0;
  std::int64_t first_ = 0;    // number of the oldest record kept
  std::int64_t tail_at_ = 0;  // number of the first record in memory
  std::deque<Mark> marks_;
  std::vector<Deletion> tail_;
  std::deque<Spilled> files_;
};

}  // namespace shoal
