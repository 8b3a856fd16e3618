// A call that is made again with other tensors of the same shapes, as the
// layers of a model make it in a step of a server. What it has in common with
// them was read once.
#pragma once

#include <array>
#include <memory>

#include "runtime/call.h"
#include "runtime/execute.h"
#include "runtime/run_plan.h"

namespace archflash {

class PreparedCall {
 public:
  // A call of attention_with_kvcache that a plan serves, without gradients. The
  // tensors among its options stay alive with this, but for `out`. batch: the
  // tuple of the options in BATCH.
  PreparedCall(const Arguments& arguments, const Call& call, std::shared_ptr<PreparedPlan> plan,
               Templates like, nb::handle batch, nb::handle implementation);

  // What attention() of call_path.h returns. NotImplemented where the call
  // differs in more than the addresses of its tensors: then it has to be read
  // as a whole. options: their `out` and those of `batch` do not count. With
  // the very tuple of the prepared call its tensors are not read again: their
  // memory and the numbers in it must be those of then. q may also have its
  // heads and columns in one dimension and its rows in another, as servers have
  // it; the output that is allocated has them likewise.
  nb::object run(nb::handle q, nb::handle k, nb::handle v, nb::handle options, nb::handle out,
                 nb::handle batch, nb::handle implementation) const;

 private:
  // The workspace of a batch's layers, which run one behind the other on a stream. Each capture of
  // a graph has one of its own, so that the graph has the launches that serve all its layers.
  struct Shared {
    static constexpr int64_t LAYERS = 64;  // that it has counters for
    // It is kept until the batch ends, so that larger ones are allocated for each layer alone.
    static constexpr int64_t MOST_BYTES = 64 << 20;
    std::unique_ptr<DeviceBytes> bytes;
    void* stream = nullptr;
    uint64_t capture = 0;
    int64_t next = 0;  // layer
    // A thread launches a layer with it, without Python's lock. Layers of other threads have a
    // workspace of their own meanwhile: none comes before the launches that serve them all, and
    // none clears the counters of this one.
    bool in_use = false;

    // The workspace of a plan, and behind it the counters of each layer.
    struct Layout {
      int64_t first_counters, of_layer, bytes;
    };
    static Layout layout(const LaunchPlan& plan);
  };
  // Launches a layer with it. False where that is not possible, and nothing was launched.
  bool launch_layer(Call& call) const;

  // What a problem depends on of a tensor.
  struct Like {
    TensorView view;
    int32_t align = 0;  // 0: there is no tensor
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];

    void set(nb::handle tensor, const char* name);
    bool fits(const TensorView& other) const;
    // But for shape and strides.
    bool is_of_kind(const TensorView& other) const;
    // Whether this is the other one, (rows, heads * columns), in other dimensions.
    bool fits_flat(const TensorView& other) const;
  };
  // Puts the address of a tensor into a call; false if it is not like that of
  // the prepared one. same: it is that tensor, whose memory may be another
  // (set_, resize_).
  static bool replace(nb::handle tensor, const char* name, const Like& like, Operand operand,
                      Call& call, bool same = false);

  Call call_;
  std::shared_ptr<PreparedPlan> plan_;
  Templates like_;
  Templates flat_;  // for q in two dimensions; without `out` where that is not served
  nb::object batch_, implementation_;
  nb::list options_;  // those of the prepared call, without `out`
  bool gives_out_;
  Like q_, k_, v_;
  std::array<Like, OPTION_COUNT> of_options_;
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();  // guarded by Python's lock
};

}  // namespace archflash
