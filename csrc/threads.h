#pragma once
// Our own threads: no OpenMP, so nothing fights torch's pool, and fork stays safe.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace shoal {

class Pool {
 public:
  static Pool& instance();

  // Runs body(item, lane) for every item in [0, items). `threads` counts the caller; lanes number
  // the threads at work, 0 .. threads-1. The first exception is rethrown here after all ended.
  void run(std::int64_t items, int threads,
           const std::function<void(std::int64_t item, int lane)>& body);

 private:
  struct Job;

  Pool() = default;
  void grow(int workers);
  void work(std::stop_token stop);

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<Job*> jobs_;
  std::vector<std::jthread> workers_;
  std::atomic<std::uint64_t> posted_{0};
};

// In a forked child, of what a thread of its parent was using at that moment.
class ForkedError : public std::exception {
 public:
  const char* what() const noexcept override {
    return "table in a forked process: got a table that another thread was using when the process "
           "was forked; allowed: a fork while no call is under way. Start the process with the "
           "method 'spawn' or 'forkserver', or fork before threads use the table.";
  }
};

// Calls `in_child(owner)` in forked children. The last member of its owner: gone before the others.
class ForkHook {
 public:
  ForkHook(void* owner, void (*in_child)(void*) noexcept);
  ~ForkHook();
  ForkHook(const ForkHook&) = delete;
  ForkHook& operator=(const ForkHook&) = delete;
  void run() const noexcept { in_child_(owner_); }

 private:
  void* owner_;
  void (*in_child_)(void*) noexcept;
};

// A lock of its kind in a forked child, which has none of the threads that may hold it.
template <class Mutex>
void renew(Mutex& mutex) noexcept {
  new (&mutex) Mutex();
}

// First come, first served, readers that stand next to each other enter together: neither trainers
// nor lookups starve. In a child that was forked while it was in use, it throws ForkedError.
class FairLock {
 public:
  void lock() { enter(true); }
  void unlock() { leave(true); }
  void lock_shared() { enter(false); }
  void unlock_shared() { leave(false); }
  bool broken() const { return broken_.load(std::memory_order_relaxed); }

 private:
  void enter(bool alone);
  void leave(bool alone);

  std::atomic<int> inside_{0};  // threads that wait for it or hold it
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::condition_variable turn_;
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
  std::uint64_t waiting_ = 0;
  int readers_ = 0;
  bool writer_ = false;
  ForkHook hook_{this, [](void* self) noexcept {
                   auto& lock = *static_cast<FairLock*>(self);
                   lock.broken_ = lock.broken_ || lock.inside_ != 0;
                 }};
};

using ReadGuard = std::shared_lock<FairLock>;
using WriteGuard = std::unique_lock<FairLock>;

}  // namespace shoal
