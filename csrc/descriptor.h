#pragma once
// A descriptor of an open file, closed with this.
#include <unistd.h>

#include <utility>

namespace shoal {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int number() const { return number_; }  // negative: none

 private:
  int number_;
};

}  // namespace shoal
