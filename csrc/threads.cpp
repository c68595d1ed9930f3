#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <unordered_set>

#include "buffers.h"


namespace shoal {

namespace {
constexpr int kMostWorkers = 1023;
}

struct Pool::Job {
  const std::function<void(std::int64_t, int)>* body;
  std::int64_t items;
  std::atomic<std::int64_t> next{0};
  int lanes_wanted;
  int lanes_given = 1;  // lane 0 is the caller; guarded by mutex_
  int helping = 0;      // guarded by mutex_
  std::mutex error_mutex;
  std::exception_ptr error;

  void drain(int lane) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      try {
        (*body)(item, lane);
      } catch (...) {  // carried to the caller's thread, which rethrows it
        const std::lock_guard guard(error_mutex);
        if (!error) error = std::current_exception();
        next.store(items, std::memory_order_relaxed);
      }
    }
  }
};

namespace {
std::atomic<Pool*> current{nullptr};
std::mutex create_mutex;

struct Hooks {
  std::mutex mutex;
  std::unordered_set<const ForkHook*> all;
};

Hooks& hooks() {
  static Hooks* const made = new Hooks();  // outlives every owner
  return *made;
}

void before_fork() {
  create_mutex.lock();
  hooks().mutex.lock();
  Buffers::instance().mutex().lock();  // held for moments only
  packed_blocks_mutex().lock();        // the same; nothing is locked inside it
}

void after_fork() {
  packed_blocks_mutex().unlock();
  Buffers::instance().mutex().unlock();
  hooks().mutex.unlock();
  create_mutex.unlock();
}

[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, [] {
  for (const ForkHook* hook : hooks().all) hook->run();
  after_fork();
  // A forked child has none of the parent's threads: it forgets the pool and makes its own.
  current.store(nullptr, std::memory_order_release);
});
}  // namespace

ForkHook::ForkHook(void* owner, void (*in_child)(void*) noexcept)
    : owner_(owner), in_child_(in_child) {
  const std::lock_guard guard(hooks().mutex);
  hooks().all.insert(this);
}

ForkHook::~ForkHook() {
  const std::lock_guard guard(hooks().mutex);
  hooks().all.erase(this);
}

Pool& Pool::instance() {
  Pool* pool = current.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  const std::lock_guard guard(create_mutex);
  pool = current.load(std::memory_order_acquire);
  if (pool == nullptr) {
    pool = new Pool();  // never destroyed: threads must not be joined during process exit
    current.store(pool, std::memory_order_release);
  }
  return *pool;
}

void Pool::grow(int workers) {
  while (static_cast<int>(workers_.size()) < std::min(workers, kMostWorkers)) {
    try {
      workers_.emplace_back([this](std::stop_token stop) { work(stop); });
    } catch (const std::system_error&) {
      return;  // the system starts no more: those at work take all items
    }
  }
}

void Pool::run(std::int64_t items, int threads,
               const std::function<void(std::int64_t, int)>& body) {
  const int lanes = static_cast<int>(std::min<std::int64_t>(items, threads));
  if (lanes <= 1) {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  Job job;
  job.body = &body;
  job.items = items;
  job.lanes_wanted = lanes;
  {
    const std::lock_guard guard(mutex_);
    grow(lanes - 1);
    jobs_.push_back(&job);
    posted_.fetch_add(1, std::memory_order_release);
  }
  if (lanes == 2) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
  job.drain(0);
  std::unique_lock guard(mutex_);
  std::erase(jobs_, &job);
  // Helpers are inside their last item: shorter than a sleep.
  while (job.helping > 0) {
    guard.unlock();
    std::this_thread::yield();
    guard.lock();
  }
  guard.unlock();
  if (job.error) std::rethrow_exception(job.error);
}

void Pool::work(std::stop_token stop) {
  constexpr int kSpins = 4000;
  while (!stop.stop_requested()) {
    // Phases of one step follow each other within microseconds; sleeping between them costs more.
    const std::uint64_t seen = posted_.load(std::memory_order_acquire);
    Job* job = nullptr;
    int lane = 0;
    {
      std::unique_lock guard(mutex_);
      const auto open = [this]() -> Job* {
        for (Job* candidate : jobs_) {
          if (candidate->lanes_given < candidate->lanes_wanted &&
              candidate->next.load(std::memory_order_relaxed) < candidate->items) {
            return candidate;
          }
        }
        return nullptr;
      };
      job = open();
      if (job == nullptr) {
        guard.unlock();
        for (int spin = 0; spin < kSpins; ++spin) {
          if (posted_.load(std::memory_order_acquire) != seen) break;
#if defined(__x86_64__)
          __builtin_ia32_pause();
#endif
        }
        guard.lock();
        wake_.wait(guard, stop, [&] { return (job = open()) != nullptr; });
        if (job == nullptr) return;
      }
      lane = job->lanes_given++;
      ++job->helping;
    }
    job->drain(lane);
    const std::lock_guard guard(mutex_);
    --job->helping;
  }
}

void FairLock::enter(bool alone) {
  inside_.fetch_add(1);
  if (broken()) {
    inside_.fetch_sub(1);
    throw ForkedError();
  }
  std::unique_lock guard(mutex_);
  const std::uint64_t ticket = next_++;
  const auto ready = [&] {
    return ticket == serving_ && !writer_ && (!alone || readers_ == 0);
  };
  if (!ready()) {
    ++waiting_;
    turn_.wait(guard, ready);
    --waiting_;
  }
  if (alone) {
    writer_ = true;
  } else {
    ++readers_;
    ++serving_;
    if (waiting_ > 0) turn_.notify_all();
  }
}

void FairLock::leave(bool alone) {
  {
    const std::lock_guard guard(mutex_);
    if (alone) {
      writer_ = false;
      ++serving_;
    } else {
      --readers_;
    }
    if (readers_ == 0 && waiting_ > 0) turn_.notify_all();
  }
  inside_.fetch_sub(1);
}

}  // namespace shoal
