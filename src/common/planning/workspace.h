// The bytes that a plan's launches leave for one another. Pure host code.
#pragma once

#include <cstdint>

namespace archflash::core {

// Parts of the workspace, one after another, each where data of any type may start.
class Workspace {
 public:
  static constexpr int64_t ALIGNMENT = 256;

  // Adds a part; returns the byte at which it starts.
  int64_t add(int64_t bytes) {
    const int64_t start = whole_bytes();
    end_ = start + bytes;
    return start;
  }

  int64_t bytes() const { return end_; }  // up to the end of the last part
  int64_t whole_bytes() const { return (end_ + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

 private:
  int64_t end_ = 0;
};

}  // namespace archflash::core
