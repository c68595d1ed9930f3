#include "pre_images.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "background.h"
#include "buffers.h"
#include "hash.h"
#include "prefetch.h"

namespace shoal {
namespace {

constexpr std::size_t kMarkBytes = std::size_t{64} << 10;  // of a run, from mark to mark
constexpr std::size_t kIoBytes = std::size_t{1} << 20;
constexpr std::size_t kKeptFull = 2;  // full segments; a further one is filled, the last is spare
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kStopBytes = std::size_t{1} << 20;  // of pages made between looks whether to stop

}  // namespace

PreImages::PreImages(std::vector<Form> forms, std::size_t budget_bytes,
                     const std::atomic<std::uint32_t>& clock)
    : forms_(std::move(forms)),
      clock_(clock),
      process_(static_cast<long>(getpid())) {
  for (Form& form : forms_) {
    form.record = (sizeof(PreImage) + form.weights + form.state + 7) & ~std::size_t{7};
    largest_ = std::max(largest_, form.record);
    most_bytes_ += form.rows * (form.record + sizeof(Entry));
  }
  const std::size_t share = budget_bytes / segments_.size();
  segment_bytes_ = (std::max(share, largest_ + sizeof(Entry)) + 63) & ~std::size_t{63};
  thread_ = std::make_unique<std::thread>([this] { work(); });
}

PreImages::~PreImages() {
  if (process_ != static_cast<long>(getpid())) {
    // A forked child has no such thread, and to detach it fails once its memory has another use.
    // What that one waits for is never ended: it would take it to stop waiting.
    static_cast<void>(thread_.release());
    static_cast<void>(filled_.release());
    return;
  }
  {
    const std::lock_guard guard(mutex_);
    stop_ = true;
  }
  filled_->notify_all();
  thread_->join();
  // The next snapshot finds them with their pages.
  for (Segment& segment : segments_) {
    if (segment.block.bytes() > 0) Buffers::instance().give_back(std::move(segment.block));
  }
}

PreImages::Entry* PreImages::entries(const Segment& segment) const {
  return reinterpret_cast<Entry*>(segment.block.data() + segment_bytes_) - segment.entries;
}

void PreImages::fail(const char* why) noexcept {
  {
    const std::lock_guard guard(mutex_);
    if (!failed_.exchange(true)) {
      try {
        why_ = why;
      } catch (const std::bad_alloc&) {
        why_.clear();
      }
    }
  }
  freed_.notify_all();
}

void PreImages::check() const {
  if (!failed_) return;
  if (forked_) throw std::runtime_error("the process was forked");
  const std::lock_guard guard(mutex_);
  throw std::runtime_error(why_.empty() ? "out of memory" : why_);
}

PreImageStats PreImages::stats() const {
  const std::lock_guard guard(mutex_);
  return PreImageStats{kept_.load(), static_cast<std::int64_t>(written_), waited_s_};
}

// One whose pages are there, if there is any.
PreImages::Segment* PreImages::free_one() {
  Segment* found = nullptr;
  for (Segment& segment : segments_) {
    if (segment.state != State::empty) continue;
    if (segment.block.bytes() > 0) return &segment;
    if (found == nullptr) found = &segment;
  }
  return found;
}

void PreImages::rotate(std::unique_lock<std::mutex>& guard) {
  if (active_ != nullptr) {
    active_->state = State::full;
    full_.push_back(active_);
    active_ = nullptr;
  }
  if (full_.size() >= kKeptFull) {
    filled_->notify_one();
  }
  Segment* next = free_one();
  if (next == nullptr) {
    const auto start = std::chrono::steady_clock::now();
    // Another thread of the verb may make one active while this one waits.
    freed_.wait(guard, [&] { return failed_ || active_ != nullptr || (next = free_one()) != nullptr; });
    waited_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (failed_ || active_ != nullptr) return;
  }
  if (next->block.bytes() == 0) next->block = Buffers::instance().take(segment_bytes_);
  next->used = next->entries = 0;
  next->state = State::active;
  active_ = next;
  freed_.notify_all();
}

PreImages::Claim PreImages::claim(const Form& form, std::uint32_t n) {
  std::unique_lock guard(mutex_);
  for (;;) {
    if (failed_) return Claim{nullptr, 0, 0, 0};
    if (active_ != nullptr) {
      Segment& s = *active_;
      const std::size_t room = segment_bytes_ - s.used - s.entries * sizeof(Entry);
      const auto fit = static_cast<std::uint32_t>(
          std::min<std::size_t>(n, room / (form.record + sizeof(Entry))));
      if (fit > 0) {
        const Claim claim{&s, s.used, s.entries, fit};
        s.used += fit * form.record;
        s.entries += fit;
        s.writers.fetch_add(1);
        return claim;
      }
    }
    rotate(guard);
  }
}

void PreImages::copy(const Claim& claim, int table, const RowView& view, const std::int32_t* rows,
                     const std::uint32_t* versions) {
  const Form& form = forms_[table];
  constexpr std::uint32_t kAhead = 12;
  char* to = claim.segment->block.data() + claim.at;
  auto* entry = reinterpret_cast<Entry*>(claim.segment->block.data() + segment_bytes_) - claim.entry;
  const std::uint32_t clock = clock_.load(std::memory_order_relaxed);
  // Forced inline: see prefetch.h.
  const auto ask = [&](std::uint32_t i) __attribute__((always_inline)) {
    const auto row = static_cast<std::uint32_t>(rows[i]);
    prefetch_row(weight_row(view, row), form.weights);
    prefetch_row(state_row(view, row), form.state);
    __builtin_prefetch(&row_id(view, row));
    __builtin_prefetch(&row_seen(view, row));
  };
  for (std::uint32_t i = 0; i < std::min(kAhead, claim.n); ++i) ask(i);
  for (std::uint32_t i = 0; i < claim.n; ++i, to += form.record) {
    if (i + kAhead < claim.n) ask(i + kAhead);
    const auto row = static_cast<std::uint32_t>(rows[i]);
    const LastSeen seen = row_seen(view, row);
    const PreImage image{row_id(view, row), static_cast<std::uint32_t>(table), row, versions[i],
                         seen.seconds, seen.count, clock};
    std::memcpy(to, &image, sizeof(image));
    std::memcpy(to + sizeof(image), weight_row(view, row), form.weights);
    if (form.state > 0) {
      std::memcpy(to + sizeof(image) + form.weights, state_row(view, row), form.state);
    }
    *--entry = Entry{hash_of(image.id, form.salt), image.table,
                     static_cast<std::uint32_t>((to - claim.segment->block.data()) / 8)};
  }
  kept_.fetch_add(claim.n, std::memory_order_relaxed);
  // The last writer of a full segment wakes the spilling thread, which may be waiting for it.
  if (claim.segment->writers.fetch_sub(1) == 1) {
    const std::lock_guard guard(mutex_);
    if (claim.segment->state != State::active) filled_->notify_one();
  }
}

void PreImages::add(int table, const RowView& view, const std::int32_t* rows,
                    const std::uint32_t* versions, std::uint32_t n) noexcept {
  // A step must not fail for want of a copy: the snapshot does instead.
  try {
    for (std::uint32_t done = 0; done < n;) {
      const Claim part = claim(forms_[table], n - done);
      if (part.segment == nullptr) return;
      copy(part, table, view, rows + done, versions + done);
      done += part.n;
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

std::size_t PreImages::runs() const {
  const std::lock_guard guard(mutex_);
  return runs_.size();
}

void PreImages::put(const PreImage& image, const char* weights, const char* state,
                    const RowColumns& to, std::size_t i) const {
  const Form& form = forms_[image.table];
  to.ids[i] = image.id;
  to.versions[i] = image.version;
  to.seen_s[i] = image.seen_s;
  to.counts[i] = image.count;
  std::memcpy(to.weights + i * form.weights, weights, form.weights);
  if (to.state != nullptr && form.state > 0) {
    std::memcpy(to.state + i * form.state, state, form.state);
  }
}

void PreImages::work() {
  try {
    give_way();
    prepare();
  } catch (const std::exception& error) {
    fail(error.what());
    return;
  }
  spill();
}

// Has the pages made of as many segments as all rows of the point may fill.
void PreImages::prepare() {
  std::size_t left = most_bytes_;
  for (Segment& segment : segments_) {
    if (left == 0) return;
    {
      const std::lock_guard guard(mutex_);
      if (segment.block.bytes() > 0) continue;  // a verb was quicker
    }
    Block block = Buffers::instance().take(segment_bytes_);
    const std::size_t bytes = std::min(left, segment_bytes_);
    for (std::size_t at = 0; at < bytes; at += kPageBytes) {
      if (at % kStopBytes == 0) {
        const std::lock_guard guard(mutex_);
        if (stop_) return;
      }
      *static_cast<volatile char*>(block.data() + at) = 0;
    }
    left -= bytes;
    {
      const std::lock_guard guard(mutex_);
      if (segment.block.bytes() == 0) std::swap(segment.block, block);
    }
  }
}

void PreImages::spill() {
  std::unique_lock guard(mutex_);
  const auto due = [this] { return full_.size() >= kKeptFull && full_.front()->writers == 0; };
  for (;;) {
    filled_->wait(guard, [&] { return stop_ || failed_ || due(); });
    if (stop_ || failed_) return;
    Segment& segment = *full_.front();
    segment.state = State::spilling;
    full_.pop_front();
    guard.unlock();
    try {
      Run run = write_run(segment);
      guard.lock();
      written_ = run.end;
      runs_.push_back(std::move(run));
      segment.state = State::written;
    } catch (const std::exception& error) {
      if (guard.owns_lock()) guard.unlock();
      fail(error.what());
      return;
    }
    filled_->wait(guard, [&] { return stop_ || segment.readers == 0; });
    segment.state = State::empty;
    freed_.notify_all();
  }
}

PreImages::Run PreImages::write_run(const Segment& segment) {
  if (!file_) file_ = std::make_unique<UnnamedFile>();
  const Entry* from = entries(segment);
  order_.assign(from, from + segment.entries);
  std::sort(order_.begin(), order_.end(), [](const Entry& a, const Entry& b) {
    return a.table != b.table ? a.table < b.table : a.hash < b.hash;
  });
  out_.reserve(std::max(kIoBytes, largest_) + largest_);
  out_.clear();
  Run run{{}, written_};  // only this thread writes it
  const auto flush = [&] {
    file_->write(out_.data(), out_.size(), run.end);
    run.end += out_.size();
    out_.clear();
  };
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const Entry& entry = order_[i];
    const std::uint64_t offset = run.end + out_.size();
    if (run.marks.empty() || run.marks.back().table != entry.table ||
        offset - run.marks.back().offset >= kMarkBytes) {
      run.marks.push_back(Mark{entry.hash, offset, entry.table});
    }
    const char* record = segment.block.data() + std::size_t{entry.place} * 8;
    if (i + 8 < order_.size()) {
      prefetch_row(segment.block.data() + std::size_t{order_[i + 8].place} * 8, largest_);
    }
    out_.insert(out_.end(), record, record + forms_[entry.table].record);
    if (out_.size() >= kIoBytes) flush();
  }
  flush();
  return run;
}

void PreImages::visit(FairLock& lock, int table, std::uint64_t first, std::uint64_t last,
                      std::size_t first_run, const Visit& visit) {
  check();
  const Form& form = forms_[table];
  struct Held {
    Segment* segment;
    const Entry *from, *to;
  };
  std::vector<Held> held;
  held.reserve(segments_.size());
  std::size_t runs = 0;
  {
    // Nobody writes records or entries at this moment, so that those there are, are whole; they stay
    // as they are while the segment has a reader.
    const ReadGuard reading(lock);
    const std::lock_guard guard(mutex_);
    runs = runs_.size();
    for (Segment& segment : segments_) {
      if (segment.state == State::empty || segment.state == State::written) continue;
      ++segment.readers;
      const Entry* const from = entries(segment);
      held.push_back(Held{&segment, from, from + segment.entries});
    }
  }
  const auto release = [&] {
    {
      const std::lock_guard guard(mutex_);
      for (const Held& one : held) --one.segment->readers;
    }
    filled_->notify_all();
  };
  try {
    for (const Held& one : held) {
      for (const Entry* entry = one.from; entry != one.to; ++entry) {
        if (entry->table != static_cast<std::uint32_t>(table) || entry->hash < first ||
            entry->hash > last) {
          continue;
        }
        const char* at = one.segment->block.data() + std::size_t{entry->place} * 8;
        PreImage image;
        std::memcpy(&image, at, sizeof(image));
        visit(image, at + sizeof(image), at + sizeof(image) + form.weights);
      }
    }
  } catch (...) {  // rethrown once nothing is held
    release();
    throw;
  }
  release();
  for (std::size_t r = first_run; r < runs; ++r) {
    const Run* run = nullptr;
    {
      const std::lock_guard guard(mutex_);
      run = &runs_[r];  // stays where it is
    }
    read_run(*run, table, first, last, visit);
  }
}

void PreImages::read_run(const Run& run, int table, std::uint64_t first, std::uint64_t last,
                         const Visit& visit) {
  const auto number = static_cast<std::uint32_t>(table);
  const auto after = [&](std::uint64_t hash) {
    return std::upper_bound(run.marks.begin(), run.marks.end(), hash,
                            [number](std::uint64_t h, const Mark& mark) {
                              return mark.table != number ? number < mark.table : h < mark.hash;
                            });
  };
  const auto stop = after(last);
  auto start = after(first);
  if (start != run.marks.begin()) --start;
  if (start == stop) return;
  const std::uint64_t end = stop == run.marks.end() ? run.end : stop->offset;
  std::uint64_t offset = start->offset;
  std::vector<char> bytes(std::min<std::uint64_t>(end - offset, std::max(kIoBytes, largest_)));
  std::size_t size = 0;
  while (offset < end) {
    const auto more = std::min<std::uint64_t>(bytes.size() - size, end - offset);
    file_->read(bytes.data() + size, more, offset);
    size += more;
    offset += more;
    std::size_t at = 0;
    while (at + sizeof(PreImage) <= size) {
      PreImage image;
      std::memcpy(&image, bytes.data() + at, sizeof(image));
      const Form& form = forms_[image.table];
      if (at + form.record > size) break;
      const std::uint64_t hash = hash_of(image.id, form.salt);
      if (image.table == number && hash >= first && hash <= last) {
        const char* weights = bytes.data() + at + sizeof(image);
        visit(image, weights, weights + form.weights);
      }
      at += form.record;
    }
    std::memmove(bytes.data(), bytes.data() + at, size - at);
    size -= at;
  }
}

}  // namespace shoal
