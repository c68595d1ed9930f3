// Blocks: zeroed, aligned to a line and apart from each other, whatever came back before.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>
#include <vector>

#include "expect.h"
#include "memory.h"

using shoal::Block;

namespace {

bool filled(const Block& block, char with) {
  return std::all_of(block.data(), block.data() + block.bytes(), [&](char c) { return c == with; });
}

using Make = Block (*)(std::size_t bytes);

Block alone(std::size_t bytes) { return Block(bytes); }
Block kept(std::size_t bytes) { return Block::packed(bytes); }
Block outgrown(std::size_t bytes) { return Block::packed(bytes, true); }

void churn(std::size_t steps, std::size_t most_bytes, Make made) {
  std::vector<std::pair<Block, char>> blocks;
  std::mt19937_64 random(11);
  for (std::size_t step = 0; step < steps; ++step) {
    if (blocks.size() > 50 && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      EXPECT(filled(blocks.back().first, blocks.back().second));
      blocks.pop_back();
      continue;
    }
    Block block = made(1 + random() % most_bytes);
    EXPECT(reinterpret_cast<std::uintptr_t>(block.data()) % 64 == 0);
    EXPECT(filled(block, 0));
    const auto with = static_cast<char>(1 + step % 100);
    std::memset(block.data(), with, block.bytes());
    blocks.emplace_back(std::move(block), with);
  }
  for (const auto& [block, with] : blocks) EXPECT(filled(block, with));
}

// Sizes where the step between sizes changes, up to blocks of a mapping of their own.
void sizes() {
  for (std::size_t edge = 64; edge <= (std::size_t{4} << 20); edge *= 2) {
    for (const std::size_t bytes : {edge - 1, edge, edge + 1}) {
      Block first = Block::packed(bytes), second = Block::packed(bytes);
      std::memset(first.data(), 1, bytes);
      EXPECT(filled(second, 0));
      EXPECT(first.bytes() == bytes);
    }
  }
  EXPECT(Block(0).data() == nullptr);
}

std::size_t resident_bytes() {
  std::size_t pages = 0, whole = 0;
  std::ifstream("/proc/self/statm") >> whole >> pages;
  return pages * 4096;
}

// Chunks whose blocks have all come back are the system's again.
void given_back(Make made) {
  const std::size_t before = resident_bytes();
  std::vector<Block> blocks;
  for (int k = 0; k < 200; ++k) {
    blocks.push_back(made(std::size_t{1} << 20));
    std::memset(blocks.back().data(), 1, blocks.back().bytes());
  }
  EXPECT(resident_bytes() > before + (std::size_t{150} << 20));
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(3));
  blocks.clear();
  EXPECT(resident_bytes() < before + (std::size_t{64} << 20));
}

}  // namespace

int main() {
  for (const Make made : {alone, kept, outgrown}) {
    churn(5'000, 2'000, made);
    churn(2'000, 100'000, made);
    churn(300, std::size_t{3} << 20, made);
  }
  sizes();
  given_back(kept);
  given_back(outgrown);
  return failures == 0 ? 0 : 1;
}
