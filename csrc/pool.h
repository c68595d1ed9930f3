#pragma once
// Our own threads: no OpenMP, so nothing fights torch's pool, and fork stays safe.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
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

// First come, first served, readers that stand next to each other enter together: neither trainers
// nor lookups starve.
class FairLock {
 public:
  void lock();
  void unlock();
  void lock_shared();
  void unlock_shared();

 private:
  std::mutex mutex_;
  std::condition_variable turn_;
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
  std::uint64_t waiting_ = 0;
  int readers_ = 0;
  bool writer_ = false;
};

using ReadGuard = std::shared_lock<FairLock>;
using WriteGuard = std::unique_lock<FairLock>;

}  // namespace shoal
