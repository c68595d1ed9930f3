#pragma once
// Copies of rows as they were before a verb changed them: in a bounded memory buffer, then in an
// unnamed temporary file. Whose they are, kept_rows.h decides.
//
// Memory is four segments. Records grow from the front of one, entries (hash, where) from its end.
// A thread of its own has their pages made before they are needed: a step that fills fresh ones pays
// for their zeros. While two are full, it sorts the older and writes it as a run: records by
// (table, hash), with a mark in memory every 64 KiB, so that a range of hashes is found again.
//
// add() runs under the shard's exclusive lock, from several threads at once; any number of threads
// read.
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "layout.h"
#include "memory.h"
#include "threads.h"
#include "unnamed_file.h"

namespace shoal {

struct PreImage {
  std::int64_t id;
  std::uint32_t table, row, version, seen_s, count;
  std::uint32_t clock;  // when it was copied
};
static_assert(sizeof(PreImage) == 32);

// Of two times of a clock, which starts at 0 again after 2^32 - 1.
inline bool earlier(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

struct PreImageStats {
  std::int64_t rows = 0, spilled_bytes = 0;
  double waited_s = 0;  // verbs that waited for the disk
};

class PreImages {
 public:
  struct Form {  // of a table's rows
    std::size_t weights, state;  // bytes
    std::uint64_t salt;
    std::size_t rows;            // numbers that rows of the snapshot point lie below
    std::size_t record = 0;      // bytes of a copy; set by PreImages
  };
  // Copies get the time of the clock, which readers move.
  PreImages(std::vector<Form> forms, std::size_t budget_bytes,
            const std::atomic<std::uint32_t>& clock);
  PreImages(const PreImages&) = delete;
  PreImages& operator=(const PreImages&) = delete;
  ~PreImages();

  // Copies rows, whose versions are told.
  void add(int table, const RowView& view, const std::int32_t* rows, const std::uint32_t* versions,
           std::uint32_t n) noexcept;
  bool failed() const { return failed_.load(std::memory_order_relaxed); }  // a copy was lost
  std::size_t runs() const;  // written so far
  // A copy's row of the columns.
  void put(const PreImage& image, const char* weights, const char* state, const RowColumns& to,
           std::size_t i) const;

  // Calls visit(image, weights, state) for the table's copies with first <= hash <= last, those of
  // the first runs left out; takes the shard's lock for a moment. Throws std::runtime_error when the
  // file failed.
  using Visit = std::function<void(const PreImage&, const char* weights, const char* state)>;
  void visit(FairLock& lock, int table, std::uint64_t first, std::uint64_t last,
             std::size_t first_run, const Visit& visit);
  void check() const;  // throws std::runtime_error when a copy was lost
  PreImageStats stats() const;

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint32_t table, place;  // in units of 8 bytes
  };
  // A written one is a run already, but someone still reads it.
  enum class State { empty, active, full, spilling, written };
  struct Segment {
    Block block;
    std::size_t used = 0, entries = 0;
    std::atomic<int> writers{0};
    int readers = 0;
    State state = State::empty;
  };
  struct Mark {
    std::uint64_t hash, offset;
    std::uint32_t table;
  };
  struct Run {
    std::vector<Mark> marks;
    std::uint64_t end;
  };
  struct Claim {
    Segment* segment;
    std::size_t at, entry;
    std::uint32_t n;
  };

  Entry* entries(const Segment& segment) const;
  Claim claim(const Form& form, std::uint32_t n);
  void copy(const Claim& claim, int table, const RowView& view, const std::int32_t* rows,
            const std::uint32_t* versions);
  void rotate(std::unique_lock<std::mutex>& guard);
  Segment* free_one();
  void work();
  void prepare();
  void spill();
  Run write_run(const Segment& segment);
  void read_run(const Run& run, int table, std::uint64_t first, std::uint64_t last,
                const Visit& visit);
  void fail(const char* why) noexcept;

  std::vector<Form> forms_;
  const std::atomic<std::uint32_t>& clock_;
  std::size_t segment_bytes_, largest_ = 0, most_bytes_ = 0;  // of a segment; a copy; all copies
  std::atomic<bool> failed_{false}, forked_{false};
  std::atomic<std::int64_t> kept_{0};

  mutable std::mutex mutex_;  // all below; inside the shard's lock, never around it
  std::condition_variable freed_;
  std::unique_ptr<std::condition_variable> filled_ = std::make_unique<std::condition_variable>();
  std::array<Segment, 4> segments_;
  Segment* active_ = nullptr;
  std::deque<Segment*> full_;  // oldest first
  std::deque<Run> runs_;
  std::unique_ptr<UnnamedFile> file_;
  std::uint64_t written_ = 0;
  double waited_s_ = 0;
  bool stop_ = false;
  std::string why_;
  std::vector<Entry> order_;   // scratch of the thread
  std::vector<char> out_;
  std::unique_ptr<std::thread> thread_;
  const long process_;
  // What other threads may be doing with it is not known in a forked child: nothing more is kept.
  ForkHook hook_{this, [](void* self) noexcept {
                   auto& images = *static_cast<PreImages*>(self);
                   renew(images.mutex_);
                   images.failed_ = images.forked_ = true;
                 }};
};

}  // namespace shoal
