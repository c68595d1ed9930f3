// Threads as ranks on one region. Run under the thread sanitizer by `make tsan`.
#include "shared_memory.h"

#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"

namespace {

using shoal::Bytes;
using shoal::SharedCall;
using shoal::SharedGroup;
using shoal::SharedRegion;

constexpr std::int64_t kSecond = 1'000'000'000;

std::string name_of(const char* test) {
  return "/shoal-test-" + std::to_string(getpid() % 100'000) + test;
}

std::shared_ptr<SharedRegion> region_of(const char* test, int ranks, std::size_t slot_bytes) {
  auto region = SharedRegion::create(name_of(test), 7, ranks, slot_bytes);
  SharedRegion::unlink(name_of(test));
  return region;
}

template <class Body>
void on_ranks(int ranks, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

// Sizes and contents that every rank can work out for every pair.
std::size_t size_of(int call, int from, int to) {
  std::mt19937 random(static_cast<unsigned>(call * 64 + from * 8 + to));
  const std::size_t kinds[] = {0, 1, random() % 100, random() % 3000, random() % 50'000};
  return kinds[random() % 5];
}

char byte_of(int call, int from, int to, std::size_t i) {
  return static_cast<char>(call * 31 + from * 7 + to * 3 + static_cast<int>(i % 251));
}

struct Exchange {
  int number, rank;
  std::vector<std::vector<char>> out, in;
  std::shared_ptr<SharedCall> call = std::make_shared<SharedCall>();

  Exchange(int n, int r, int ranks) : number(n), rank(r), out(ranks), in(ranks) {
    call->sends.resize(ranks);
    call->receives.resize(ranks);
    for (int peer = 0; peer < ranks; ++peer) {
      out[peer].resize(size_of(n, r, peer));
      for (std::size_t i = 0; i < out[peer].size(); ++i) out[peer][i] = byte_of(n, r, peer, i);
      in[peer].assign(size_of(n, peer, r), 0);
      const std::size_t cut = out[peer].size() / 3;  // two runs out, one run in
      call->sends[peer].add(Bytes{out[peer].data(), cut});
      call->sends[peer].add(Bytes{out[peer].data() + cut, out[peer].size() - cut});
      call->receives[peer].add(Bytes{in[peer].data(), in[peer].size()});
    }
  }

  bool right() const {
    for (int peer = 0; peer < static_cast<int>(in.size()); ++peer) {
      for (std::size_t i = 0; i < in[peer].size(); ++i) {
        if (in[peer][i] != byte_of(number, peer, rank, i)) return false;
      }
    }
    return true;
  }
};

void uneven(int ranks, int calls, int in_flight) {
  const auto region = region_of("u", ranks, 1024);
  on_ranks(ranks, [&](int rank) {
    SharedGroup group(region, rank, 20 * kSecond);
    std::vector<Exchange> exchanges;
    for (int n = 0; n < calls; ++n) exchanges.emplace_back(n, rank, ranks);
    for (int n = 0; n < calls + in_flight; ++n) {
      if (n < calls) group.start(exchanges[n].call);
      if (n < in_flight) continue;
      EXPECT(group.wait(*exchanges[n - in_flight].call, 20 * kSecond));
      EXPECT(exchanges[n - in_flight].right());
    }
    // The others may still read what this one sent: a close is no failure of theirs.
    EXPECT(group.failure().fault == shoal::Fault::none);
  });
}

void one_stays_away() {
  const auto region = region_of("a", 3, 1024);
  on_ranks(3, [&](int rank) {
    SharedGroup group(region, rank, kSecond / 5);
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      return;
    }
    std::vector<char> out(3), in(3);
    auto call = std::make_shared<SharedCall>();
    call->sends.resize(3);
    call->receives.resize(3);
    for (int peer = 0; peer < 3; ++peer) {
      call->sends[peer].add(Bytes{&out[peer], 1});
      call->receives[peer].add(Bytes{&in[peer], 1});
    }
    group.start(call);
    EXPECT(!group.wait(*call, 5 * kSecond));
    const auto failure = group.failure();
    EXPECT(failure.fault == shoal::Fault::timeout || failure.fault == shoal::Fault::failed);
    EXPECT(failure.peer == 2 || failure.blamed == 2);
  });
}

void one_leaves() {
  const auto region = region_of("l", 2, 1024);
  on_ranks(2, [&](int rank) {
    SharedGroup group(region, rank, 20 * kSecond);
    if (rank == 1) return;
    std::vector<char> byte(1);
    auto call = std::make_shared<SharedCall>();
    call->sends.resize(2);
    call->receives.resize(2);
    call->receives[1].add(Bytes{byte.data(), 1});
    group.start(call);
    EXPECT(!group.wait(*call, 5 * kSecond));
    EXPECT(group.failure().fault == shoal::Fault::closed);
    EXPECT(group.failure().peer == 1);
  });
}

void sizes_differ() {
  const auto region = region_of("d", 2, 1024);
  on_ranks(2, [&](int rank) {
    SharedGroup group(region, rank, 20 * kSecond);
    std::vector<char> out(8), in(8);
    auto call = std::make_shared<SharedCall>();
    call->sends.resize(2);
    call->receives.resize(2);
    call->sends[1 - rank].add(Bytes{out.data(), rank == 0 ? 8u : 4u});
    call->receives[1 - rank].add(Bytes{in.data(), 8});
    group.start(call);
    if (rank == 0) {
      EXPECT(!group.wait(*call, 5 * kSecond));
      EXPECT(group.failure().fault == shoal::Fault::mismatch);
    } else {
      group.wait(*call, kSecond / 2);
    }
  });
}

void closed_while_waiting() {
  const auto region = region_of("c", 2, 1024);
  SharedGroup group(region, 0, 20 * kSecond);
  const SharedGroup other(region, 1, 20 * kSecond);
  std::vector<char> many(100'000);
  auto call = std::make_shared<SharedCall>();
  call->sends.resize(2);
  call->receives.resize(2);
  call->sends[1].add(Bytes{many.data(), many.size()});
  group.start(call);  // more than the ring holds: the group's thread waits for room
  std::thread waiter([&] { EXPECT(!group.wait(*call, 10 * kSecond)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  group.close();
  waiter.join();
}

void another_job() {
  const std::string name = name_of("j");
  const auto region = SharedRegion::create(name, 7, 2, 1024);
  EXPECT(SharedRegion::open(name, 7)->world_size() == 2);
  bool refused = false;
  try {
    SharedRegion::open(name, 8);
  } catch (const shoal::SharedMemoryError&) {
    refused = true;
  }
  EXPECT(refused);
  SharedRegion::unlink(name);
}

}  // namespace

int main() {
  for (const int ranks : {1, 2, 3, 4}) {
    uneven(ranks, 60, 0);
    uneven(ranks, 60, 5);
  }
  one_stays_away();
  one_leaves();
  sizes_differ();
  closed_while_waiting();
  another_job();
  return failures;
}
