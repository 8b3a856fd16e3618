// What a traced CTA records: tracks, and what happened on each. Time is the number of
// warp-instructions that the CTA has executed; nothing here says how long anything takes on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace archflash::sim {

struct TraceEvent {
  enum class Kind : uint8_t {
    Run,    // a warp executed the instructions from `pc` on, one after the other
    Wait,   // nothing happened on the track until `label` came about
    Async,  // work that goes on by itself, from its issue to its landing
  };
  Kind kind = Kind::Run;
  int track = 0;  // index in Trace::tracks
  uint64_t begin = 0, end = 0;
  uint32_t pc = 0;     // the first instruction; the one that waits; the one that issued the work
  uint64_t bytes = 0;  // that asynchronous work moves
  uint64_t seen = 0;   // when asynchronous work was waited for
  int cause = -1;      // the track that ended a wait; -1: none or its own
  std::string label;   // of a wait: for what; of asynchronous work: with what
  // Of a product in the tensor pipe: D, A, B and what it is. D, and A where it is in tensor memory,
  // are addresses, the others descriptors.
  std::vector<uint64_t> operands{};
};

constexpr const char* BULK_TRACK = "bulk copies";
constexpr const char* TMEM_TRACK = "tensor memory";  // what is allocated
constexpr const char* TENSOR_TRACK = "tensor pipe";  // products that no warp waits in

struct Trace {
  std::vector<std::string> tracks;  // the warps first: warp w is track w
  std::vector<TraceEvent> events;

  // The track of that name, made when there is none yet.
  int track(const std::string& name) {
    for (size_t i = 0; i < tracks.size(); ++i) {
      if (tracks[i] == name) return static_cast<int>(i);
    }
    tracks.push_back(name);
    return static_cast<int>(tracks.size()) - 1;
  }

  // Adds asynchronous work on the track of that name; without `bytes` what it does is no copy.
  void add_async(const std::string& name, TraceEvent event) {
    event.kind = TraceEvent::Kind::Async;
    event.track = track(name);
    events.push_back(std::move(event));
  }
};

}  // namespace archflash::sim
