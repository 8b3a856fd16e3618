// What a traced CTA records: tracks, and the events on each. Time is the number of
// warp-instructions that the CTA has executed; it does not say how long anything takes on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace archflash::sim {

struct TraceEvent {
  enum class Kind : uint8_t {
    Run,    // a warp executed instructions from `pc` on, one after the other
    Wait,   // nothing happened on the track; `label` says what it waited for
    Async,  // work beside the warps, from its issue to its landing; `label` says with what
  };
  Kind kind = Kind::Run;
  int track = 0;  // its index in Trace::tracks
  uint64_t begin = 0, end = 0;
  uint32_t pc = 0;     // the first instruction, the one that waits, or the one that issued the work
  uint64_t bytes = 0;  // how many bytes asynchronous work moves
  uint64_t seen = 0;   // when asynchronous work was waited for
  int cause = -1;      // the track that ended a wait; -1: none or the same
  std::string label;
  // A product in the tensor pipe has D, A, B and its instruction descriptor here. D, and A where it
  // is in tensor memory, are addresses; the others are descriptors.
  std::vector<uint64_t> operands{};
};

constexpr const char* BULK_TRACK = "bulk copies";
constexpr const char* TMEM_TRACK = "tensor memory";  // allocations
constexpr const char* TENSOR_TRACK = "tensor pipe";  // products

struct Trace {
  std::vector<std::string> tracks;  // the warps first: warp w is track w
  std::vector<TraceEvent> events;

  // Returns the track of that name, and makes it if there is none.
  int track(const std::string& name) {
    for (size_t i = 0; i < tracks.size(); ++i) {
      if (tracks[i] == name) return static_cast<int>(i);
    }
    tracks.push_back(name);
    return static_cast<int>(tracks.size()) - 1;
  }

  // Adds asynchronous work to the track of that name. Without `bytes` the work is no copy.
  void add_async(const std::string& name, TraceEvent event) {
    event.kind = TraceEvent::Kind::Async;
    event.track = track(name);
    events.push_back(std::move(event));
  }
};

}  // namespace archflash::sim
