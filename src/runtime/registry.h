// The folders of kernels in this build: what each implementation of attention says of itself, what
// each folder is built for, and their plans.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/planning/backward_problem.h"
#include "common/planning/merge_problem.h"
#include "common/planning/plan.h"
#include "common/planning/quantize_problem.h"
#include "runtime/targets.h"

namespace archflash {

// The folders, as dispatch asks them where nothing was measured: newer instructions first.
const std::vector<std::string>& folder_names();
const Description& describe(std::string_view name);
// What a folder's kernels were compiled for; empty when this build left the folder out. `name` is
// that of an implementation, of the folder of quantize_fp8 or merge_attention, or of an image
// ("folder/stem"), which may be compiled for less than its folder.
const std::vector<Target>& targets(std::string_view name);
// Whether any of it loads on a capability, 10 * major + minor.
bool has_code(std::string_view name, int capability);

// A plan of one of PyTorch's operators, whose log-sum-exp has PyTorch's value for rows that see no
// key: the same plan where there are no such rows. `self_attention`: the sequences of packed keys
// are those of the queries, so that each row sees its own key.
PlanResult with_lse_for_pytorch(const LaunchPlan& plan, bool self_attention);

// The folder's plan(), after asking whether its code loads on the device at all.
PlanResult plan(std::string_view name, const Problem& problem, const Device& device);

// Whether a folder has a backward pass; and its plan_backward(), after the questions of plan().
bool has_backward(std::string_view name);
PlanResult plan_backward(std::string_view name, const BackwardProblem& problem,
                         const Device& device);

// What a plan does, for people; of plans that do not compute attention only what they copy.
Notes notes(const LaunchPlan& plan);

// The names that quantize_fp8 has for its kernels, and whether any run on a capability.
std::vector<std::string> quantizer_names();
bool has_quantizer(int capability);
// The plan of a quantiser. Throws std::invalid_argument where there is none.
LaunchPlan plan_quantize(const QuantizeProblem& problem, const Device& device);

// The kernels of merge_attention, likewise.
std::vector<std::string> merger_names();
bool has_merger(int capability);
LaunchPlan plan_merge(const MergeProblem& problem, const Device& device);

// The targets whose machine code ARCHFLASH_MACHINE_CODE has left out of this build, which has the
// PTX that it would be made from; and what to tell of one of them.
const std::vector<std::string>& left_out_targets();
std::string no_machine_code(std::string_view target);

// The target whose code of an image "<folder>/<stem>" a capability runs; empty where there is none,
// and for images that add_image() got.
std::string target_for(std::string_view image, int capability);
// The code of an image for a target: a cubin, or PTX. What add_image() got stands for the target
// "". Empty where this build has none.
std::string code_of(std::string_view image, std::string_view target);
// Unpacks one member of an archive of machine code, or with a null archive the PTX of an image for
// a target. Python sets it (bindings/registry.cpp): it takes the GIL, so no lock may be held.
extern std::string (*unpack)(std::string_view archive, std::string_view image,
                             std::string_view target);
std::vector<std::string> image_names();
// Adds a cubin or fatbin that is not in this build, for plans whose launches name it. It stays for
// the life of the process. Throws std::invalid_argument if the name is taken by other bytes or is
// none, and if there is no code.
void add_image(const std::string& name, std::string_view code);

}  // namespace archflash
