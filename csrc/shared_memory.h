#pragma once
// Collective calls of the ranks of one host over a SharedRegion. Every rank makes the same calls in
// the same order; each moves bytes between all pairs, of any sizes, and reads every stream in order.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shared_region.h"

namespace shoal {

struct Bytes {
  char* at;
  std::size_t count;
};

// What goes to one rank, or comes from it: runs of memory, in stream order.
struct Message {
  std::vector<Bytes> runs;
  std::uint64_t whole = 0;
  std::uint64_t moved = 0;
  std::size_t run = 0;    // where the next byte is
  std::size_t inside = 0;  // within that run

  void add(Bytes bytes);
  bool finished() const { return moved == whole; }
};

struct SharedCall {
  std::vector<Message> sends, receives;  // by rank; one's own are copied, not sent
  std::uint32_t tag = 0;                 // the same on all ranks, else the call fails
  std::uint64_t number = 0;
  std::int64_t deadline_ns = 0;          // of the steady clock; 0: not yet waited for
  bool own_copied = false;
  bool done = false;                     // guarded by the group's lock

  bool sent() const;
  bool received() const;
};

struct Failure {
  Fault fault = Fault::none;
  int peer = -1;             // who did it, or was waited for
  Fault theirs = Fault::none;  // with Fault::failed: why that rank stopped
  int blamed = -1;             // and whom it waited for; with Fault::mismatch: the tag of its call
  std::string detail;
};

class SharedGroup {
 public:
  SharedGroup(std::shared_ptr<SharedRegion> region, int rank, std::int64_t timeout_ns);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Once every rank has made its group: from here on the death of one is seen by the others.
  void watch_peers();

  // Begins a call: what fits into the rings is sent at once, a thread of this group sends the rest.
  // The memory of the call's messages is the caller's until it is done.
  void start(const std::shared_ptr<SharedCall>& call);
  // True when done; false after `most_ns`, or when the group has failed.
  bool wait(SharedCall& call, std::int64_t most_ns);

  Failure failure() const;
  void close();

 private:
  // In the heap, and left there by the copy in a forked child: threads that wait on it are gone.
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
  };
  using Lock = std::unique_lock<std::mutex>;

  bool alive() const;
  void turn(Lock& lock, std::int64_t until_ns);
  void work();
  void advance(SharedCall& call, std::int64_t until_ns);
  bool push(SharedCall& call, int to);
  bool pop(SharedCall& call, int from);
  bool ready(const SharedCall& call, int peer) const;
  bool ready(const SharedCall& call) const;
  bool worth_staying_awake(const SharedCall& call) const;
  void await(SharedCall& call, std::int64_t until_ns);
  void check(const SharedCall& call, bool slept);
  void fail(Failure failure);

  std::shared_ptr<SharedRegion> region_;  // null once closed
  const int rank_;
  const int world_size_;
  const std::int64_t timeout_ns_;
  const int process_;
  std::int64_t awake_ns_;
  Peers peers_;

  std::unique_ptr<Gate> gate_ = std::make_unique<Gate>();
  std::unique_ptr<std::thread> worker_;
  std::deque<std::shared_ptr<SharedCall>> calls_;  // not done, in order
  std::uint64_t started_ = 0;
  bool moving_ = false;  // a thread moves bytes of the first call, without the lock
  std::atomic<int> waiting_{0};  // threads inside `wait`
  std::atomic<bool> stopped_{false};
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace shoal
