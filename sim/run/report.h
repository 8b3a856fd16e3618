// What a run found. Errors are wrong whether or not a card shows it; lints are what hardware
// tolerates.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace archflash::sim {

enum class Severity : uint8_t { Error, Lint };

struct Finding {
  Severity severity = Severity::Error;
  std::string kind;     // one word: "out-of-bounds", "race", "deadlock", ...
  std::string message;  // a sentence
  int64_t cta = -1;     // index in the grid, x fastest; -1: it belongs to no single CTA
  int warp = -1;
  int lane = -1;
  int64_t pc = -1;        // index of the instruction; -1: none
  int64_t other_pc = -1;  // the other side of a race
  uint64_t address = 0;
  bool fatal = false;  // the CTA stopped here
  uint64_t count = 1;  // how often it was found
};

// A handler throws this when its CTA cannot go on.
struct Fault {
  std::string kind;
  std::string message;
  int lane = -1;
  uint64_t address = 0;
};

// Thrown when the user asks to give a run up.
struct Interrupted {};

// Keeps one finding for each (kind, pc, other_pc), up to a limit, and counts the rest. The limit
// holds for each severity by itself, so that many lints do not hide errors.
class Findings {
 public:
  void add(Finding finding);
  void merge(const Findings& other);
  const std::vector<Finding>& list() const { return list_; }
  uint64_t dropped() const { return dropped_; }

 private:
  static constexpr size_t LIMIT = 64;
  std::vector<Finding> list_;
  std::array<size_t, 2> kept_{};  // by severity
  uint64_t dropped_ = 0;
};

}  // namespace archflash::sim
