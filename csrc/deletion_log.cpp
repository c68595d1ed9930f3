#include "deletion_log.h"

#include <algorithm>
#include <stdexcept>

namespace shoal {

void DeletionLog::empty() {
  first_ = tail_at_ = 0;
  marks_.clear();
  tail_ = {};
  files_.clear();
  broken_ = false;
}

void DeletionLog::start(std::uint32_t floor) {
  empty();
  open_ = true;
  floor_ = floor;
  for (auto& [_, version] : held_) version = floor;
}

void DeletionLog::stop() {
  empty();
  open_ = false;
}

void DeletionLog::append(int table, std::int64_t id) noexcept {
  const Deletion record{id, version_, static_cast<std::uint32_t>(table)};
  append(&record, 1);
}

void DeletionLog::append(const Deletion* records, std::size_t n) noexcept {
  if (!open_ || broken_) return;
  // A deletion must not fail for want of a record of it: the shard turns to a new incarnation instead.
  try {
    for (std::size_t i = 0; i < n; ++i) push(records[i]);
  } catch (const std::exception&) {
    broken_ = true;
  }
}

void DeletionLog::push(const Deletion& record) {
  if (tail_.size() == in_memory_) spill();
  if (marks_.empty() || marks_.back().version < record.version) {
    marks_.push_back(Mark{record.version, tail_at_ + static_cast<std::int64_t>(tail_.size())});
  }
  tail_.push_back(record);
}

void DeletionLog::spill() {
  if (files_.empty() || files_.back().n >= in_file_) {
    files_.push_back(Spilled{UnnamedFile(), tail_at_, 0});
  }
  Spilled& to = files_.back();
  to.file.write(tail_.data(), tail_.size() * sizeof(Deletion),
                static_cast<std::uint64_t>(to.n) * sizeof(Deletion));
  to.n += static_cast<std::int64_t>(tail_.size());
  tail_at_ += static_cast<std::int64_t>(tail_.size());
  tail_.clear();
}

void DeletionLog::release(std::uint32_t version) {
  if (!open_ || version <= floor_) return;
  floor_ = version;
  std::erase_if(held_, [version](const auto& one) { return one.second < version; });
  first_ = after(version);
  while (!marks_.empty() && marks_.front().version <= version) marks_.pop_front();
  while (!files_.empty() && files_.front().first + files_.front().n <= first_) files_.pop_front();
  if (first_ <= tail_at_) return;
  tail_.erase(tail_.begin(), tail_.begin() + (first_ - tail_at_));
  tail_at_ = first_;
}

std::uint32_t DeletionLog::passed() const {
  const auto slowest = std::min_element(held_.begin(), held_.end(), [](const auto& a, const auto& b) {
    return a.second < b.second;
  });
  return slowest->second;
}

std::uint32_t DeletionLog::hold(const std::string& consumer, std::uint32_t version) {
  std::uint32_t& own = held_.try_emplace(consumer, floor_).first->second;
  own = std::max(own, version);
  return passed();
}

std::optional<std::uint32_t> DeletionLog::leave(const std::string& consumer) {
  held_.erase(consumer);
  if (held_.empty()) return std::nullopt;
  return passed();
}

std::optional<std::uint32_t> DeletionLog::excess() const {
  const std::int64_t end = tail_at_ + static_cast<std::int64_t>(tail_.size());
  if (!open_ || end - first_ <= most_) return std::nullopt;
  std::uint32_t version = floor_;
  for (const Mark& mark : marks_) {
    if (end - mark.first <= most_) break;
    version = mark.version;
  }
  return version;
}

std::int64_t DeletionLog::after(std::uint32_t version) const {
  const auto mark = std::upper_bound(
      marks_.begin(), marks_.end(), version,
      [](std::uint32_t e, const Mark& m) { return e < m.version; });
  return mark == marks_.end() ? tail_at_ + static_cast<std::int64_t>(tail_.size()) : mark->first;
}

std::vector<Deletion> DeletionLog::read(std::int64_t first, std::int64_t n) const {
  const std::int64_t end = tail_at_ + static_cast<std::int64_t>(tail_.size());
  first = std::max(first, first_);
  const std::int64_t stop = std::min(first + n, end);
  std::vector<Deletion> records(static_cast<std::size_t>(std::max<std::int64_t>(stop - first, 0)));
  std::int64_t at = first;
  for (const Spilled& from : files_) {
    const std::int64_t until = std::min(stop, from.first + from.n);
    if (at < from.first || at >= until) continue;
    from.file.read(records.data() + (at - first),
                   static_cast<std::size_t>(until - at) * sizeof(Deletion),
                   static_cast<std::uint64_t>(at - from.first) * sizeof(Deletion));
    at = until;
  }
  if (at < stop) std::copy_n(tail_.begin() + (at - tail_at_), stop - at, records.begin() + (at - first));
  return records;
}

}  // namespace shoal
