// Runs a plan for a call: allocates what it writes, fills in the addresses, and launches it, or on
// the CPU has it simulated.
#pragma once

#include <memory>

#include "runtime/call.h"
#include "runtime/execute.h"

namespace archflash {

// What functions of PyTorch that allocate a tensor take: (shape, strides, dtype).
nb::tuple strided(int ndim, const int64_t* shape, const int64_t* strides, DType dtype);
// A new tensor of that kind, or like a tensor, on the device of `beside`, which has the index
// `device_index` (-1 on the CPU).
nb::object new_tensor(nb::handle from, nb::handle beside, int device_index);

// The address of a tensor that was allocated for a call; set_address() notes it there.
void* address_of_new(nb::handle tensor, const char* name);
void set_address(Call& call, Operand operand, nb::handle tensor);

// What the outputs of a call are made from: (shape, strides, dtype), or a tensor without memory for
// torch.empty_like. Null where no template was prepared.
struct Templates {
  nb::object out, lse;
};

// The template of an output, and that of a log-sum-exp. `column`: the log-sum-exp has a last
// dimension of size 1.
nb::object template_of_out(nb::handle q, const Call& call);
// That of an output with rows in one dimension and the columns of all heads in another; null where
// it would not lie so in memory.
nb::object template_of_flat_out(const Call& call);
nb::object template_of_lse(nb::handle q, const Call& call, bool column);

// What a call writes. Null where nothing is asked for.
struct Outputs {
  nb::object out, lse, workspace;
  DeviceBytes workspace_bytes;  // instead of `workspace`, where no tensor is needed
};

// Allocates what is missing and completes the addresses of the call. all_tensors: the workspace is
// wanted as a tensor.
void allocate(const LaunchPlan& plan, const Arguments& a, Call& call, Outputs& made,
              bool all_tensors, const Templates& like = {});

// Allocates the outputs alone that are missing.
void allocate_outputs(const Arguments& a, Call& call, Outputs& made, const Templates& like);

// What a call returns: out, or (out, lse).
nb::object results_of(const Outputs& outputs, const Call& call);

// Allocates the workspace of a plan and notes its address.
void allocate_workspace(const LaunchPlan& plan, nb::handle q, Call& call, Outputs& made,
                        bool all_tensors);

// Packed sequences of which there is none have no plan to launch: every row of q is one of no
// sequence, whose output is 0 and whose log-sum-exp is the sink, or -inf.
void write_rows_of_no_sequence(nb::handle out, nb::handle lse, nb::handle sinks);

// The tensors of a call by operand name, as the simulator takes them.
nb::dict by_operand(const Arguments& a, const Outputs& outputs);

// What `archflash.sim` is asked with for tensors on the CPU: (LaunchPlan, {operand name: tensor}).
nb::object& simulate();

// A plan that was chosen, with its kernels; on the CPU a plan is simulated: no kernel is looked
// up.
std::shared_ptr<PreparedPlan> prepare_for(const Call& call, std::shared_ptr<LaunchPlan> plan);

// Allocates what is missing, binds and launches. Returns out, or (out, lse).
nb::object run(const PreparedPlan& prepared, const Arguments& a, Call& call,
               const Templates& like = {});

}  // namespace archflash
