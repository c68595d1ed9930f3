#include "shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "stream.h"

namespace shoal {
namespace {

constexpr std::int64_t kNap = 20'000'000;       // between looks at whether peers still live
constexpr std::int64_t kTurn = 100'000'000;     // of the worker, between looks at whether to stop
constexpr std::uint64_t kStreamed = 8u << 20;   // messages that would not stay in the caches
// From here on, to another core: lines that both write and read go back and forth between caches at
// a third of the speed of memory.
constexpr std::uint64_t kStreamedAcross = 16u << 10;
constexpr std::size_t kOwnAtOnce = 64u << 10;
constexpr int kPauses = 100;
constexpr std::int64_t kAwake = 100'000;  // before sleeping, whose end costs as much
constexpr std::int64_t kAwakeCrowded = 20'000;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void copy(char* to, const char* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

void copy_past_caches(char* to, const char* from, std::size_t bytes) {
  if constexpr (kStreamVector != 0) {
    const std::size_t odd = reinterpret_cast<std::uintptr_t>(to) % kStreamVector;
    const std::size_t first = odd == 0 ? 0 : std::min(bytes, kStreamVector - odd);
    copy(to, from, first);
    stream_bytes(to + first, from + first, bytes - first);
  } else {
    copy(to, from, bytes);
  }
}

// Moves `bytes` between a message and a slot; `move(run, slot, count)` knows the direction.
template <class Move>
void walk(Message& message, char* slot, std::size_t bytes, Move move) {
  message.moved += bytes;
  while (bytes > 0) {
    const Bytes& run = message.runs[message.run];
    const std::size_t count = std::min(bytes, run.count - message.inside);
    move(run.at + message.inside, slot, count);
    slot += count;
    bytes -= count;
    message.inside += count;
    if (message.inside == run.count) {
      ++message.run;
      message.inside = 0;
    }
  }
}

void copy_own(SharedCall& call, int rank) {
  Message& from = call.sends[rank];
  Message& to = call.receives[rank];
  const bool streamed = to.whole >= kStreamed;
  for (const Bytes& run : to.runs) {
    walk(from, run.at, run.count, [streamed](const char* source, char* target, std::size_t n) {
      streamed ? copy_past_caches(target, source, n) : copy(target, source, n);
    });
  }
  if (streamed) end_stream();
  to.moved = to.whole;
  call.own_copied = true;
}

}  // namespace

void Message::add(Bytes bytes) {
  if (bytes.count == 0) return;
  runs.push_back(bytes);
  whole += bytes.count;
}

bool SharedCall::sent() const {
  return std::all_of(sends.begin(), sends.end(), [](const Message& m) { return m.finished(); });
}

bool SharedCall::received() const {
  return std::all_of(receives.begin(), receives.end(),
                     [](const Message& m) { return m.finished(); });
}

SharedGroup::SharedGroup(std::shared_ptr<SharedRegion> region, int rank, std::int64_t timeout_ns)
    : region_(std::move(region)),
      rank_(rank),
      world_size_(region_->world_size()),
      timeout_ns_(timeout_ns),
      process_(getpid()) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  awake_ns_ = world_size_ <= cores ? kAwake : kAwakeCrowded;
  RankCell& cell = region_->cell(rank_);
  cell.pid.store(process_);
  cell.state.store(static_cast<std::uint32_t>(RankState::attached));
}

SharedGroup::~SharedGroup() { close(); }

void SharedGroup::watch_peers() {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_) peers_.watch(rank, region_->cell(rank).pid.load());
  }
}

// False in the copy that a forked child has: it has no worker, and the ranks know its parent.
bool SharedGroup::alive() const {
  return !stopped_.load() && !failed_.load() && getpid() == process_;
}

void SharedGroup::start(const std::shared_ptr<SharedCall>& call) {
  if (getpid() != process_) return;
  Lock lock(gate_->mutex);
  if (!alive()) return;
  call->number = ++started_;
  region_->note_core(rank_);
  if (call->sends[rank_].whole <= kOwnAtOnce) copy_own(*call, rank_);
  const bool next = !moving_ && std::all_of(calls_.begin(), calls_.end(), [](const auto& earlier) {
    return earlier->sent();
  });
  calls_.push_back(call);
  if (next) {
    for (int ahead = 1; ahead < world_size_; ++ahead) {
      while (push(*call, (rank_ + ahead) % world_size_)) {
      }
    }
    if (call->sent()) return;
  }
  if (worker_ == nullptr) worker_ = std::make_unique<std::thread>([this] { work(); });
  lock.unlock();
  gate_->changed.notify_all();
}

// Moves the first call on, unlocked meanwhile.
void SharedGroup::turn(Lock& lock, std::int64_t until_ns) {
  const std::shared_ptr<SharedCall> first = calls_.front();
  moving_ = true;
  lock.unlock();
  advance(*first, until_ns);
  lock.lock();
  moving_ = false;
  if (first->own_copied && first->sent() && first->received()) {
    first->done = true;
    calls_.pop_front();
  }
  gate_->changed.notify_all();
}

bool SharedGroup::wait(SharedCall& call, std::int64_t most_ns) {
  if (getpid() != process_) return false;
  const std::int64_t until = now_ns() + most_ns;
  Lock lock(gate_->mutex);
  waiting_.fetch_add(1);
  while (!call.done && alive()) {
    const std::int64_t left = until - now_ns();
    if (left <= 0) break;
    if (moving_) {
      gate_->changed.wait_for(lock, std::chrono::nanoseconds(left));
    } else {
      turn(lock, until);
    }
  }
  waiting_.fetch_sub(1);
  return call.done;
}

void SharedGroup::work() {
  Lock lock(gate_->mutex);
  while (!stopped_.load()) {
    const bool needed =
        !moving_ && alive() && std::any_of(calls_.begin(), calls_.end(), [](const auto& call) {
          return !call->sent();
        });
    if (needed) {
      turn(lock, now_ns() + kTurn);
    } else {
      gate_->changed.wait(lock);
    }
  }
}

void SharedGroup::advance(SharedCall& call, std::int64_t until_ns) {
  if (call.deadline_ns == 0) call.deadline_ns = now_ns() + timeout_ns_;
  if (!call.own_copied) copy_own(call, rank_);
  while (alive()) {
    bool moved = false;
    bool finished = true;
    for (int ahead = 1; ahead < world_size_; ++ahead) {
      const int to = (rank_ + ahead) % world_size_;
      const int from = (rank_ + world_size_ - ahead) % world_size_;
      moved = push(call, to) || moved;
      moved = pop(call, from) || moved;
      finished = finished && call.sends[to].finished() && call.receives[from].finished();
    }
    if (finished) return;
    if (moved) continue;
    await(call, until_ns);
    if (now_ns() >= until_ns && !ready(call)) return;
  }
}

// Stores and loads of rings and bells are sequentially consistent: a reader that goes to sleep
// either sees what was written or is seen asleep.
bool SharedGroup::push(SharedCall& call, int to) {
  Message& message = call.sends[to];
  if (message.finished()) return false;
  Ring& ring = region_->ring(rank_, to);
  const std::uint64_t head = ring.head.load(std::memory_order_relaxed);
  if (head - ring.tail.load() == kSlots) return false;
  const std::size_t bytes =
      std::min<std::uint64_t>(region_->slot_bytes(), message.whole - message.moved);
  ring.slots[head % kSlots] =
      SlotInfo{call.number, message.whole, call.tag, static_cast<std::uint32_t>(bytes)};
  const bool streamed =
      message.whole >= kStreamedAcross &&
      region_->cell(to).core.load(std::memory_order_relaxed) != region_->note_core(rank_);
  walk(message, region_->slot(rank_, to, head), bytes,
       [streamed](const char* run, char* slot, std::size_t n) {
         streamed ? copy_past_caches(slot, run, n) : copy(slot, run, n);
       });
  if (streamed) end_stream();
  ring.head.store(head + 1);
  region_->ring_bell(to);
  return true;
}

bool SharedGroup::pop(SharedCall& call, int from) {
  Message& message = call.receives[from];
  if (message.finished()) return false;
  Ring& ring = region_->ring(from, rank_);
  const std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  if (ring.head.load() == tail) return false;
  const SlotInfo info = ring.slots[tail % kSlots];
  if (info.call != call.number || info.tag != call.tag || info.whole != message.whole ||
      info.bytes > message.whole - message.moved) {
    Failure failure;
    failure.fault = Fault::mismatch;
    failure.peer = from;
    failure.blamed = static_cast<int>(info.tag);
    failure.detail = "it sent " + std::to_string(info.whole) + " bytes in its call " +
                     std::to_string(info.call) + "; here call " + std::to_string(call.number) +
                     " takes " + std::to_string(message.whole) + " bytes" +
                     (info.call == call.number && info.tag != call.tag
                          ? ", and the two calls have other names"
                          : "");
    fail(std::move(failure));
    return false;
  }
  const bool streamed = message.whole >= kStreamed;
  walk(message, region_->slot(from, rank_, tail), info.bytes,
       [streamed](char* run, const char* slot, std::size_t n) {
         streamed ? copy_past_caches(run, slot, n) : copy(run, slot, n);
       });
  if (streamed) end_stream();
  ring.tail.store(tail + 1);
  region_->ring_bell(from);
  return true;
}

bool SharedGroup::ready(const SharedCall& call, int peer) const {
  if (!call.sends[peer].finished()) {
    const Ring& ring = region_->ring(rank_, peer);
    if (ring.head.load() - ring.tail.load() < kSlots) return true;
  }
  if (call.receives[peer].finished()) return false;
  const Ring& ring = region_->ring(peer, rank_);
  return ring.head.load() != ring.tail.load();
}

bool SharedGroup::ready(const SharedCall& call) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_ && ready(call, peer)) return true;
  }
  return false;
}

// Not while nobody waits: this core may be the one that the caller computes on. Nor on a core that
// a peer needs: yielding does not always give it up.
bool SharedGroup::worth_staying_awake(const SharedCall& call) const {
  const int core = region_->note_core(rank_);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_ || (call.sends[peer].finished() && call.receives[peer].finished())) continue;
    const int other = region_->cell(peer).core.load(std::memory_order_relaxed);
    if (other == core && core >= 0) return false;
  }
  return waiting_.load() > 0;
}

void SharedGroup::await(SharedCall& call, std::int64_t until_ns) {
  for (int spin = 0; spin < kPauses; ++spin) {
    if (ready(call)) return;
    pause();
  }
  const std::int64_t awake_until = now_ns() + (worth_staying_awake(call) ? awake_ns_ : 0);
  while (now_ns() < awake_until) {
    if (ready(call)) return;
    std::this_thread::yield();
  }
  RankCell& cell = region_->cell(rank_);
  cell.asleep.store(1);
  const std::uint32_t heard = cell.bell.load();
  const std::int64_t began = now_ns();
  const std::int64_t most = std::min({kNap, until_ns - began, call.deadline_ns - began});
  check(call, false);
  if (most > 0 && alive() && !ready(call)) region_->sleep(rank_, heard, most);
  cell.asleep.store(0);
  if (alive() && !ready(call)) check(call, now_ns() - began >= kNap / 2);
}

// Fails the group if a rank that this call needs cannot go on. What it sent before counts.
void SharedGroup::check(const SharedCall& call, bool slept) {
  const bool late = now_ns() >= call.deadline_ns;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_ || (call.sends[peer].finished() && call.receives[peer].finished())) continue;
    const RankCell& cell = region_->cell(peer);
    Failure failure;
    failure.peer = peer;
    const auto state = static_cast<RankState>(cell.state.load());
    if (state == RankState::failed) {
      failure.fault = Fault::failed;
      failure.theirs = static_cast<Fault>(cell.fault.load());
      failure.blamed = cell.blamed.load();
    } else if (state == RankState::closed) {
      failure.fault = Fault::closed;
    } else if ((slept || late) && peers_.gone(peer)) {
      failure.fault = Fault::dead;
    } else if (late) {
      failure.fault = Fault::timeout;
    }
    if (failure.fault == Fault::none || ready(call, peer)) continue;
    fail(std::move(failure));
    return;
  }
}

void SharedGroup::fail(Failure failure) {
  const Lock lock(gate_->mutex);
  if (failed_.load()) return;
  RankCell& cell = region_->cell(rank_);
  cell.fault.store(static_cast<std::uint32_t>(failure.fault));
  cell.blamed.store(failure.peer);
  cell.state.store(static_cast<std::uint32_t>(RankState::failed));
  failure_ = std::move(failure);
  failed_.store(true);
  for (int peer = 0; peer < world_size_; ++peer) region_->ring_bell(peer);
}

Failure SharedGroup::failure() const {
  if (getpid() != process_) return Failure{};
  const Lock lock(gate_->mutex);
  return failure_;
}

void SharedGroup::close() {
  if (getpid() != process_) {  // a forked child: what other threads may hold is left alone
    static_cast<void>(gate_.release());
    static_cast<void>(worker_.release());
    peers_.forget();
    region_.reset();
    return;
  }
  Lock lock(gate_->mutex);
  if (stopped_.exchange(true)) return;
  region_->ring_bell(rank_);
  gate_->changed.notify_all();
  gate_->changed.wait(lock, [this] { return !moving_; });
  lock.unlock();
  if (worker_ != nullptr) worker_->join();
  lock.lock();
  if (!failed_.load()) {
    region_->cell(rank_).state.store(static_cast<std::uint32_t>(RankState::closed));
  }
  for (int peer = 0; peer < world_size_; ++peer) region_->ring_bell(peer);
  peers_.forget();
  region_.reset();
}

}  // namespace shoal
