#pragma once
// Checks that count: main() returns how many failed.
#include <cstdio>

inline int failures = 0;

#define EXPECT(condition)                                                     \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      ++failures;                                                             \
    }                                                                         \
  } while (false)
