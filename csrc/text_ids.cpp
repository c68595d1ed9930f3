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
  std::uint64_t key;  // size and whether it was read as an integer; 0 is an empty entry
};

// First and last bytes, which with the size make up a short text.
inline void load(std::string_view text, std::uint64_t (&words)[2]) {
  const char* p = text.data();
  const std::size_t n = text.size();
  words[0] = words[1] = 0;
  if (n >= 8) {
    std::memcpy(&words[0], p, 8);
    std::memcpy(&words[1], p + n - 8, 8);
  } else if (n >= 4) {
    std::memcpy(&words[0], p, 4);
    std::memcpy(&words[1], p + n - 4, 4);
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      words[0] |= static_cast<std::uint64_t>(static_cast<unsigned char>(p[i])) << (8 * i);
    }
  }
}

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
  Hashing(std::int64_t* ids, bool spelled) : ids_(ids), spelled_(spelled) {
    if (!memo_) memo_ = std::make_unique<Remembered[]>(kRemembered);
  }

  void add(std::string_view text, std::int64_t at) {
    Lane lane{text, at, nullptr, {{0, 0}, 0, 0}};
    if (text.size() <= kShort) {
      load(text, lane.made.text);
      lane.made.key = 2 * text.size() + 2 + (spelled_ ? 1 : 0);
      const std::uint64_t spread =
          (lane.made.text[0] ^ lane.made.text[1] * 0x9e3779b97f4a7c15 ^ lane.made.key) *
          0xbf58476d1ce4e5b9;
      lane.entry = &memo_[(spread >> 40) & (kRemembered - 1)];
      if (lane.entry->key == lane.made.key && lane.entry->text[0] == lane.made.text[0] &&
          lane.entry->text[1] == lane.made.text[1]) {
        ids_[at] = lane.entry->id;
        return;
      }
    }
    std::int64_t number;
    if (spelled_ && spells(text, &number)) {
      keep(lane, number);
      return;
    }
    lanes_[waiting_] = lane;
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
    for (int k = 0; k < waiting_; ++k) keep(lanes_[k], static_cast<std::int64_t>(digests_[k]));
    waiting_ = 0;
  }

 private:
  struct Lane {
    std::string_view text;
    std::int64_t at;
    Remembered* entry;
    Remembered made;
  };

  void keep(Lane& lane, std::int64_t id) {
    ids_[lane.at] = lane.made.id = id;
    if (lane.entry != nullptr) *lane.entry = lane.made;
  }

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
  bool spelled_;
  Lane lanes_[kBlakeLanes];
  std::uint64_t digests_[kBlakeLanes];
  int waiting_ = 0;
};

thread_local std::unique_ptr<Remembered[]> Hashing::memo_;

}  // namespace

template <class Offset>
void ids_of_texts(const char* data, const Offset* offsets, std::int64_t n, bool spelled,
                  std::int64_t* ids) {
  Hashing hashing(ids, spelled);
  for (std::int64_t i = 0; i < n; ++i) {
    hashing.add({data + offsets[i], static_cast<std::size_t>(offsets[i + 1] - offsets[i])}, i);
  }
  hashing.finish();
}

template void ids_of_texts(const char*, const std::int32_t*, std::int64_t, bool, std::int64_t*);
template void ids_of_texts(const char*, const std::int64_t*, std::int64_t, bool, std::int64_t*);

}  // namespace shoal
