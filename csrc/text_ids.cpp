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

// A short text as the first two words of its block, the rest of them zero.
inline void load(std::string_view text, std::uint64_t (&words)[2]) {
  const char* p = text.data();
  const std::size_t n = text.size();
  words[0] = words[1] = 0;
  if (n > 8) {
    std::memcpy(&words[0], p, 8);
    std::memcpy(&words[1], p + n - 8, 8);
    words[1] >>= 8 * (kShort - n);
  } else if (n >= 4) {
    std::uint32_t first, last;
    std::memcpy(&first, p, 4);
    std::memcpy(&last, p + n - 4, 4);
    words[0] = first | static_cast<std::uint64_t>(last) << (8 * (n - 4));
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
    static thread_local std::unique_ptr<Remembered[]> memo;
    if (!memo) memo = std::make_unique<Remembered[]>(kRemembered);
    memo_ = memo.get();
  }

  void add(std::string_view text, std::int64_t at) {
    Remembered made{{0, 0}, 0, 0}, *entry = nullptr;
    if (text.size() <= kShort) {
      load(text, made.text);
      made.key = 2 * text.size() + 2 + (spelled_ ? 1 : 0);
      const std::uint64_t spread =
          (made.text[0] ^ made.text[1] * 0x9e3779b97f4a7c15 ^ made.key) * 0xbf58476d1ce4e5b9;
      entry = &memo_[(spread >> 40) & (kRemembered - 1)];
      if (entry->key == made.key && entry->text[0] == made.text[0] &&
          entry->text[1] == made.text[1]) {
        ids_[at] = entry->id;
        return;
      }
    }
    Lane& lane = lanes_[waiting_] = Lane{text, at, entry, made};
    std::int64_t number;
    if (spelled_ && spells(text, &number)) {
      keep(lane, number);
    } else if (++waiting_ == kBlakeLanes) {
      finish();
    }
  }

  void finish() {
    if (waiting_ == 0) return;
    std::uint64_t state[8][kBlakeLanes];
    for (int i = 0; i < 8; ++i) std::fill_n(state[i], kBlakeLanes, kBlakeIv[i]);
    for (auto& word : state[0]) word ^= 0x01010000 ^ 8;  // sequential, no key, 8 bytes of digest
    std::size_t longest = 1;
    for (int k = 0; k < waiting_; ++k) longest = std::max(longest, lanes_[k].text.size());
    for (std::size_t from = 0; from < longest; from += kBlakeBlock) {
      block(state, from, longest <= kShort);
    }
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
  // `brief`: all texts are short.
  void block(std::uint64_t (&state)[8][kBlakeLanes], std::size_t from, bool brief) {
    std::uint64_t words[16][kBlakeLanes], counts[kBlakeLanes] = {}, last[kBlakeLanes] = {};
    std::memset(words, 0, brief ? 2 * sizeof words[0] : sizeof words);
    for (int k = 0; k < waiting_; ++k) {
      const std::string_view text = lanes_[k].text;
      const std::size_t stop = std::min(text.size(), from + kBlakeBlock);
      for (std::size_t i = 0; brief && i < 2; ++i) words[i][k] = lanes_[k].made.text[i];
      for (std::size_t at = from, i = 0; !brief && at < stop; at += 8, ++i) {
        std::memcpy(&words[i][k], text.data() + at, std::min<std::size_t>(8, stop - at));
      }
      counts[k] = stop;
      last[k] = stop == text.size() ? ~std::uint64_t{0} : 0;
    }
    kernels().blake_blocks(state[0], words[0], counts, last, brief);
    for (int k = 0; k < waiting_; ++k) {
      const bool ends = last[k] != 0 && (from == 0 || counts[k] > from);
      if (ends) keep(lanes_[k], static_cast<std::int64_t>(state[0][k]));
    }
  }

  Remembered* memo_;  // the thread's
  std::int64_t* ids_;
  bool spelled_;
  Lane lanes_[kBlakeLanes];
  int waiting_ = 0;
};

}  // namespace

template <class Offset>
void ids_of_texts(const char* data, const Offset* offsets, const std::uint8_t* valid,
                  std::int64_t first, std::int64_t n, bool spelled, std::int64_t missing,
                  std::int64_t* ids) {
  Hashing hashing(ids, spelled);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t k = first + i;
    if (valid != nullptr && (valid[k >> 3] >> (k & 7) & 1) == 0) {
      ids[i] = missing;
      continue;
    }
    hashing.add({data + offsets[k], static_cast<std::size_t>(offsets[k + 1] - offsets[k])}, i);
  }
  hashing.finish();
}

template void ids_of_texts(const char*, const std::int32_t*, const std::uint8_t*, std::int64_t,
                           std::int64_t, bool, std::int64_t, std::int64_t*);
template void ids_of_texts(const char*, const std::int64_t*, const std::uint8_t*, std::int64_t,
                           std::int64_t, bool, std::int64_t, std::int64_t*);

}  // namespace shoal
