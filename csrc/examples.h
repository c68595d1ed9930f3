#pragma once
// Ids of examples in memory, drawn by number into a batch: its features follow each other, each
// with the lists of the batch's examples. Called by a loader's thread, so one thread and few calls:
// each call is a wait for the interpreter, of this thread or of the one that trains.
#include <cstdint>

namespace shoal {

// Features that lie side by side in memory.
struct ExampleIds {
  const std::int64_t* values;
  const std::int64_t* offsets;  // of one feature's lists; nullptr: `width` features of one id each
  const float* weights;         // of each id; nullptr: 1
  std::int64_t width;           // features
  std::int64_t count;           // ids of lists
};

// Writes the offsets of the batch's lists, starts at 0. Returns how many ids they have, or -1 - i
// if rows[i] has a list that is not within its feature's ids.
std::int64_t example_offsets(const ExampleIds* parts, std::int64_t count,
                             const std::int64_t* rows, std::int64_t n, std::int64_t* offsets);

// Writes the ids of the lists that `example_offsets` has laid out, and their weights if asked for.
void example_ids(const ExampleIds* parts, std::int64_t count, const std::int64_t* rows,
                 std::int64_t n, const std::int64_t* offsets, std::int64_t* values,
                 float* weights);

}  // namespace shoal
