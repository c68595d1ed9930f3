#include "text_ids.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>

#include "kernels.h"

namespace shoal {
namespace {

constexpr std::size_t kShort = 16;           // bytes of a text that is remembered
constexpr std::size_t kRemembered = 1 << 13;  // per thread; a power of two

struct Remembered {
  std::uint64_t text[2];
  std::int64_t id;
  std::uint64_t size;  // plus one: 0 is an empty entry
};

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

std::string_view stripped(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// Whether a text spells an integer of 64 bits, or a boolean.
bool spells(std::string_view text, std::int64_t* id) {
  if (text.empty() || (text.back() > '9' && text.back() != 'e' && text.back() != 'E')) {
    if (text.empty() || !is_blank(text.back())) return false;
  }
  text = stripped(text);
  if (text == "true" || text == "True" || text == "TRUE") return *id = 1, true;
  if (text == "false" || text == "False" || text == "FALSE") return *id = 0, true;
  if (text == "0") return *id = 0, true;
  const bool negative = !text.empty() && text.front() == '-';
  if (negative) text.remove_prefix(1);
  if (text.empty() || text.size() > 20 || text.front() < '1' || text.front() > '9') return false;
  std::uint64_t value = 0;
  for (const char c : text) {
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (c < '0' || c > '9') return false;
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    if (value > (most - digit) / 10) return false;
    value = value * 10 + digit;
  }
  if (negative && value > std::uint64_t{1} << 63) return false;
  *id = static_cast<std::int64_t>(negative ? 0 - value : value);
  return true;
}

// Texts that wait to be hashed, one to a lane.
class Hashing {
 public:
  Hashing(std::int64_t* ids) : ids_(ids) {
    if (!memo_) memo_ = std::make_unique<Remembered[]>(kRemembered);
  }

  void add(std::string_view text, std::int64_t at) {
    Remembered* entry = nullptr;
    if (text.size() <= kShort) {
      std::uint64_t key[2] = {0, 0};
      if (!text.empty()) std::memcpy(key, text.data(), text.size());
      const std::uint64_t spread = (key[0] ^ (key[1] * 0x9e3779b97f4a7c15) ^ text.size()) *
                                   0xbf58476d1ce4e5b9;
      entry = &memo_[(spread >> 40) & (kRemembered - 1)];
      if (entry->size == text.size() + 1 && entry->text[0] == key[0] && entry->text[1] == key[1]) {
        ids_[at] = entry->id;
        return;
      }
    }
    lanes_[waiting_] = {text, at, entry};
    if (++waiting_ == kBlakeLanes) finish();
  }

  void finish() {
    if (waiting_ == 0) return;
    std::uint64_t state[8][kBlakeLanes];
    for (int i = 0; i < 8; ++i) std::fill_n(state[i], kBlakeLanes, kBlakeIv[i]);
    for (auto& word : state[0]) word ^= 0x01010000 ^ 8;  // sequential, no key, 8 bytes of digest
    std::size_t longest = 1;
    for (int k = 0; k < waiting_; ++k) longest = std::max(longest, lanes_[k].text.size());
    for (std::size_t from = 0; from < longest; from += kBlakeBlock) block(state, from);
    for (int k = 0; k < waiting_; ++k) {
      const Lane& lane = lanes_[k];
      const auto id = static_cast<std::int64_t>(digests_[k]);
      ids_[lane.at] = id;
      if (lane.entry == nullptr) continue;
      Remembered made{{0, 0}, id, lane.text.size() + 1};
      if (!lane.text.empty()) std::memcpy(made.text, lane.text.data(), lane.text.size());
      *lane.entry = made;
    }
    waiting_ = 0;
  }

 private:
  struct Lane {
    std::string_view text;
    std::int64_t at;
    Remembered* entry;
  };

  // The block that begins at a byte; lanes whose text ended before run on, and are not read again.
  void block(std::uint64_t (&state)[8][kBlakeLanes], std::size_t from) {
    std::uint64_t words[16][kBlakeLanes] = {}, counts[kBlakeLanes] = {}, last[kBlakeLanes] = {};
    for (int k = 0; k < waiting_; ++k) {
      const std::string_view text = lanes_[k].text;
      const std::size_t stop = std::min(text.size(), from + kBlakeBlock);
      for (std::size_t at = from, i = 0; at < stop; at += 8, ++i) {
        std::memcpy(&words[i][k], text.data() + at, std::min<std::size_t>(8, stop - at));
      }
      counts[k] = stop;
      last[k] = stop == text.size() ? ~std::uint64_t{0} : 0;
    }
    kernels().blake_blocks(state[0], words[0], counts, last);
    for (int k = 0; k < waiting_; ++k) {
      const std::size_t size = lanes_[k].text.size();
      if (from == (size == 0 ? 0 : (size - 1) / kBlakeBlock * kBlakeBlock)) {
        digests_[k] = state[0][k];
      }
    }
  }

  static thread_local std::unique_ptr<Remembered[]> memo_;
  std::int64_t* ids_;
  Lane lanes_[kBlakeLanes];
  std::uint64_t digests_[kBlakeLanes];
  int waiting_ = 0;
};

thread_local std::unique_ptr<Remembered[]> Hashing::memo_;

}  // namespace

template <class Offset>
void ids_of_texts(const char* data, const Offset* offsets, std::int64_t n, bool spelled,
                  std::int64_t* ids) {
  Hashing hashing(ids);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::string_view text(data + offsets[i],
                                static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
    if (!(spelled && spells(text, &ids[i]))) hashing.add(text, i);
  }
  hashing.finish();
}

template void ids_of_texts(const char*, const std::int32_t*, std::int64_t, bool, std::int64_t*);
template void ids_of_texts(const char*, const std::int64_t*, std::int64_t, bool, std::int64_t*);

}  // namespace shoal
