#include "runtime/registry.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "common/options.h"
#include "common/planning/backward_parts.h"
#include "common/planning/copies.h"
#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "folders.inc"
#include "runtime/text.h"

namespace archflash {
namespace {

const Folder& find_folder(std::string_view name) {
  for (const Folder& folder : FOLDERS) {
    if (name == folder.name) return folder;
  }
  throw std::invalid_argument(join("no implementation is called '", name, "'"));
}

// The targets of groups as CMakeLists.txt gives them, "75:75,ptx 80:80,90": the machine code of
// all, and the PTX of the group that has `ptx`, which newer GPUs run.
std::vector<Target> parse_groups(const char* text) {
  std::vector<Target> result;
  std::istringstream groups(text);
  std::string group, newer;
  while (groups >> group) {
    const size_t colon = group.find(':');
    std::istringstream list(group.substr(colon + 1));
    for (std::string number; std::getline(list, number, ',');) {
      if (number == "ptx")
        newer = group.substr(0, colon);
      else
        result.push_back(target("sm_" + number));
    }
  }
  if (!newer.empty()) result.push_back(target("compute_" + newer));
  return result;
}

std::string capability_text(int capability) { return join(capability / 10, '.', capability % 10); }

std::string targets_text(const std::vector<Target>& all) {
  std::string text;
  for (const Target& target : all) text += (text.empty() ? "" : ", ") + target.name;
  return text;
}

}  // namespace

const std::vector<std::string>& folder_names() {
  static const auto& sorted = *new std::vector<std::string>([] {
    std::vector<std::string> names;
    for (const Folder& folder : FOLDERS) names.emplace_back(folder.name);
    std::stable_sort(names.begin(), names.end(), [](const auto& one, const auto& other) {
      return describe(one).needs_capability > describe(other).needs_capability;
    });
    return names;
  }());
  return sorted;
}

const Description& describe(std::string_view name) { return find_folder(name).describe(); }

const std::vector<Target>& targets(std::string_view name) {
  static const auto& parsed = *new std::unordered_map<std::string_view, std::vector<Target>>([] {
    std::unordered_map<std::string_view, std::vector<Target>> all;
    for (const Compiled& compiled : COMPILED) all[compiled.name] = parse_groups(compiled.groups);
    return all;
  }());
  auto found = parsed.find(name);
  if (found == parsed.end()) found = parsed.find(name.substr(0, name.find('/')));
  if (found == parsed.end())
    throw std::invalid_argument(join("no folder of kernels is called '", name, "'"));
  return found->second;
}

bool has_code(std::string_view name, int capability) {
  return pick_target(targets(name), capability) != nullptr;
}

const std::vector<std::string>& left_out_targets() {
  static const auto& names = *new std::vector<std::string>([] {
    std::vector<std::string> found;
    for (const Piece& piece : PIECES) {
      if (piece.image && piece.begin == nullptr &&
          std::find(found.begin(), found.end(), piece.target) == found.end())
        found.emplace_back(piece.target);
    }
    return found;
  }());
  return names;
}

std::string no_machine_code(std::string_view target) {
  return join("this build has no machine code for ", target,
              " (ARCHFLASH_MACHINE_CODE left it out): build again with ARCHFLASH_MACHINE_CODE=all "
              "or with ",
              target.substr(target.find('_') + 1), " in it");
}

namespace {

bool lacks_machine_code(const Target& target, const Device& device) {
  const std::vector<std::string>& names = left_out_targets();
  return device.present && std::find(names.begin(), names.end(), target.name) != names.end();
}

// The code of a folder that a device runs, or the reasons why there is none.
std::variant<Target, Reasons> code_for(std::string_view name, const Device& device) {
  const std::vector<Target>& all = targets(name);
  if (all.empty()) {
    return Reasons{
        join("not compiled in this build (ARCHFLASH_ARCHS left it out): build again with "
             "ARCHFLASH_ARCHS=all or with ",
             name, " in it")};
  }
  if (const Target* target = pick_target(all, device.capability())) {
    if (lacks_machine_code(*target, device)) return Reasons{no_machine_code(target->name)};
    return *target;
  }
  return Reasons{join("compute capability ", capability_text(device.capability()), " (",
                      device.name, "): ", name, " is built for ", targets_text(all))};
}

// Adds the reasons of options that a folder does not serve, and to a plan what it was made for.
void complete(PlanResult& result, std::string_view name, const Problem& problem,
              const Device& device, const Target& target) {
  const bool refuses = std::holds_alternative<Reasons>(result);
  if (const Reasons refused = refused_options(refuses, problem, find_folder(name).describe());
      !refused.empty()) {
    if (!refuses) result = Reasons{};
    Reasons& reasons = std::get<Reasons>(result);
    reasons.insert(reasons.end(), refused.begin(), refused.end());
  }
  if (auto* planned = std::get_if<LaunchPlan>(&result)) {
    planned->implementation = name;
    planned->problem = problem;
    planned->device = device;
    const Target* code = &target;
    const Target* own = nullptr;
    std::string_view image;  // of the launch before
    for (Launch& launch : planned->launches) {
      if (launch.image != image) own = pick_target(targets(launch.image), device.capability());
      image = launch.image;
      if (own == nullptr) {
        result =
            Reasons{join("compute capability ", capability_text(device.capability()), " (",
                         device.name, "): ", launch.image, " is ",
                         targets(launch.image).empty()
                             ? std::string("not compiled in this build (ARCHFLASH_TARGETS left "
                                           "it out): build again with ARCHFLASH_TARGETS=all")
                             : join("built for ", targets_text(targets(launch.image))))};
        return;
      }
      if (lacks_machine_code(*own, device)) {
        result = Reasons{no_machine_code(own->name)};
        return;
      }
      // The PTX for newer GPUs is of a target below 9.0: its kernels cannot wait for one
      // another.
      launch.uses_pdl &= !own->is_ptx() && own->first >= 90;
      if (own->is_ptx() && image.substr(0, image.find('/')) == name) code = own;
    }
    planned->code =
        code->is_ptx() ? code->name + " PTX, compiled by the driver at first use" : code->name;
  }
}

// The plan of a folder. Where it has no kernel that reads lists of keys for gradients, another
// folder's does so for it.
PlanResult plan_gradients(const Backward& backward, const BackwardProblem& problem,
                          const Device& device) {
  const Problem& call = problem.call;
  if (call.heads_q == 0) {  // folders divide by the number of heads
    if (call.heads_kv == 0) return LaunchPlan{};
    return Reasons{join("no query heads over ", call.heads_kv, " key heads: ", backward.folder,
                        " computes gradients from query heads; use implementation='torch'")};
  }
  PlanResult own = backward.plan(problem, device);
  if (call.key_indices == 0 || call.dtype == DType::F32) return own;  // one folder has fp32
  for (const Backward& other : BACKWARDS) {
    if (std::holds_alternative<LaunchPlan>(own)) break;
    if (!other.plan || !has_code(other.folder, device.capability())) continue;
    PlanResult lent = other.plan(problem, device);
    if (std::holds_alternative<LaunchPlan>(lent)) own = std::move(lent);
  }
  return own;
}

// Why the gradients of a call cannot be computed, whatever tensors it makes for them.
Reasons why_no_gradients(const Backward& backward, const Problem& call, const Device& device) {
  const int64_t row = std::max(call.d, call.dv), head = call.nq * row;
  const BackwardTensor dense{.strides = {.batch = call.heads_q * head, .head = head, .row = row},
                             .dtype = call.dtype,
                             .column = 1,
                             .align = 16};
  BackwardProblem problem{.call = call, .dout = dense, .dq = dense, .dk = dense, .dv = dense};
  problem.call.want_lse = true;
  const PlanResult result = plan_gradients(backward, problem, device);
  const auto* reasons = std::get_if<Reasons>(&result);
  return reasons == nullptr ? Reasons{} : *reasons;
}

// A reason that names a head dimension which the caller did not give says where it comes from.
void explain_columns(Reasons& reasons, const char* name, int64_t given, int64_t asked) {
  if (given == asked) return;
  const std::string start = join(name, ' ', asked);
  for (std::string& reason : reasons) {
    if (reason.starts_with(start + ":"))
      reason.insert(start.size(), join(" (", given, " and columns of zeros)"));
  }
}

// Adds the copies to a plan for the prepared problem, or to reasons what the call itself gave.
void complete_copies(PlanResult& result, const copy::Copies& copies, const Problem& given,
                     const Problem& asked, const Device& device) {
  if (!copies.any()) return;
  if (auto* reasons = std::get_if<Reasons>(&result)) {
    explain_columns(*reasons, "head_dim", given.d, asked.d);
    explain_columns(*reasons, "value head_dim", given.dv, asked.dv);
    return;
  }
  const auto code = code_for("copy", device);
  if (const auto* reasons = std::get_if<Reasons>(&code)) {
    result = Reasons{"tensors have to be copied for this call, and the kernel that does it is " +
                     reasons->front()};
    return;
  }
  copy::add_to(std::get<LaunchPlan>(result), copies);
}

std::optional<mma_sync::FewRowsPlan> plan_few_rows_of(const Problem& problem,
                                                      const Device& device) {
  for (const FewRows& folder : FEW_ROWS) {
    if (has_code(folder.folder, device.capability())) return folder.plan(problem, device);
  }
  return {};
}

// Lends them at start: nothing plans before.
[[maybe_unused]] const auto lent = mma_sync::plan_few_rows_apart = plan_few_rows_of;

const Backward* find_backward(std::string_view name) {
  for (const Backward& backward : BACKWARDS) {
    if (backward.plan && name == backward.folder) return &backward;
  }
  return nullptr;
}

}  // namespace

PlanResult plan(std::string_view name, const Problem& problem, const Device& device) {
  const Folder& folder = find_folder(name);
  const auto code = code_for(name, device);
  if (const auto* reasons = std::get_if<Reasons>(&code)) return *reasons;
  Problem asked = problem;
  const copy::Copies copies = copy::prepare(asked);
  // The forward pass is the same. Calls with a cache have no backward pass.
  const Backward* backward =
      problem.needs_grad && !problem.kv_cache ? find_backward(name) : nullptr;
  if (backward != nullptr) asked.needs_grad = false;
  PlanResult result =
      core::nothing_to_write(asked) ? PlanResult(LaunchPlan{}) : folder.plan(asked, device);
  if (backward != nullptr && !std::holds_alternative<Reasons>(result)) {
    const Reasons reasons = why_no_gradients(*backward, asked, device);
    if (!reasons.empty()) result = reasons;
  }
  complete_copies(result, copies, problem, asked, device);
  complete(result, name, problem, device, std::get<Target>(code));
  return result;
}

PlanResult with_lse_for_pytorch(const LaunchPlan& plan, bool self_attention) {
  const Problem& p = plan.problem;
  // A row of packed sequences may have no keys. In other calls the first row has position nk - nq,
  // unless the call says where it is: then it sees the first key, in PyTorch's operators.
  const bool all_see_a_key =
      p.varlen ? self_attention && p.q_offset_default && p.window_left >= 0 && p.window_right >= 0
               : (!p.q_offset_default || p.window_right >= p.nq - p.nk) && p.nk > 0;
  if (!p.want_lse || all_see_a_key || plan.launches.empty()) return plan;
  const auto code = code_for("copy", plan.device);
  if (const auto* reasons = std::get_if<Reasons>(&code)) return *reasons;
  LaunchPlan longer = plan;
  copy::add_lse_for_pytorch(longer);
  return longer;
}

bool has_backward(std::string_view name) { return find_backward(name) != nullptr; }

PlanResult plan_backward(std::string_view name, const BackwardProblem& problem,
                         const Device& device) {
  const Backward* backward = find_backward(name);
  if (backward == nullptr)
    return Reasons{join("no backward: ", name, " computes the forward only")};
  const auto code = code_for(name, device);
  if (const auto* reasons = std::get_if<Reasons>(&code)) return *reasons;
  const auto plan_part = [&](const BackwardProblem& part, const Device& of) {
    BackwardProblem asked = part;
    const copy::Copies copies = copy::prepare(asked);
    PlanResult planned = plan_gradients(*backward, asked, of);
    complete_copies(planned, copies, part.call, asked.call, of);
    return planned;
  };
  PlanResult result = problem.call.heads_q == 0 ? plan_part(problem, device)
                                                : core::plan_in_parts(problem, device, plan_part);
  complete(result, name, problem.call, device, std::get<Target>(code));
  return result;
}

Notes notes(const LaunchPlan& plan) {
  if (plan.launches.empty()) return {{"launches", "none: there is nothing to write"}};
  Notes lines;
  if (!plan.tile.name.empty()) {
    LaunchPlan asked = plan;
    copy::prepare(asked.problem);  // the problem that the folder was asked for
    lines = core::notes(asked, find_folder(plan.implementation).notes(asked));
  }
  if (const std::string copies = copy::text_of(plan); !copies.empty())
    lines.emplace_back("copies", copies);
  return lines;
}

namespace {

// The first of a function's folders that has code for a capability; null if none has.
template <class AnyProblem, size_t N>
const Function<AnyProblem>* find(const Function<AnyProblem> (&functions)[N], int capability) {
  for (const Function<AnyProblem>& function : functions) {
    if (has_code(function.folder, capability)) return &function;
  }
  return nullptr;
}

template <class AnyProblem, size_t N>
std::vector<std::string> names_of(const Function<AnyProblem> (&functions)[N]) {
  std::vector<std::string> names;
  for (const Function<AnyProblem>& function : functions)
    names.emplace_back(function.implementation);
  return names;
}

template <class AnyProblem, size_t N>
LaunchPlan plan_with(const Function<AnyProblem> (&functions)[N], const char* name,
                     const AnyProblem& problem, const Device& device) {
  const Function<AnyProblem>* function = find(functions, device.capability());
  if (function == nullptr)
    throw std::invalid_argument(join("no kernel of ", name, " has code for ", device.name));
  LaunchPlan planned = function->plan(problem, device);
  planned.implementation = function->implementation;
  return planned;
}

}  // namespace

std::vector<std::string> quantizer_names() { return names_of(QUANTIZERS); }
bool has_quantizer(int capability) { return find(QUANTIZERS, capability) != nullptr; }
LaunchPlan plan_quantize(const QuantizeProblem& problem, const Device& device) {
  return plan_with(QUANTIZERS, "quantize_fp8", problem, device);
}

std::vector<std::string> merger_names() { return names_of(MERGERS); }
bool has_merger(int capability) { return find(MERGERS, capability) != nullptr; }
LaunchPlan plan_merge(const MergeProblem& problem, const Device& device) {
  return plan_with(MERGERS, "merge_attention", problem, device);
}

namespace {
std::mutex adding;  // guards the added images
std::map<std::string, std::string, std::less<>>& added_images() {
  static auto& images = *new std::map<std::string, std::string, std::less<>>;
  return images;
}
}  // namespace

std::string (*unpack)(std::string_view, std::string_view, std::string_view) = nullptr;

std::string code_of(std::string_view image, std::string_view target) {
  {
    const std::lock_guard lock(adding);
    const auto found = added_images().find(image);
    if (found != added_images().end()) return target.empty() ? found->second : std::string();
  }
  if (target.starts_with("compute_")) return unpack({}, image, target);
  for (const Piece& piece : PIECES) {
    if (piece.begin && image == piece.image && target == piece.target)
      return unpack({piece.begin, piece.end}, image, target);
  }
  return {};
}

std::string target_for(std::string_view image, int capability) {
  const std::lock_guard lock(adding);
  if (added_images().contains(image)) return {};
  const Target* target = pick_target(targets(image), capability);
  return target == nullptr ? std::string() : target->name;
}

void add_image(const std::string& name, std::string_view code) {
  const size_t slash = name.find('/');
  if (slash == 0 || slash == std::string::npos || slash + 1 == name.size()) {
    throw std::invalid_argument(
        join("an image with the name '", name, "': it must be '<folder>/<stem>'"));
  }
  if (code.empty())
    throw std::invalid_argument(join("the image '", name, "' is empty: give a cubin or fatbin"));
  const std::vector<std::string> built = image_names();
  bool taken = std::find(built.begin(), built.end(), name) != built.end();
  const std::lock_guard lock(adding);
  if (!taken) taken = added_images().try_emplace(name, code).first->second != code;
  if (taken) throw std::invalid_argument(join("there is another image with the name '", name, "'"));
}

std::vector<std::string> image_names() {
  std::vector<std::string> names;
  for (const Piece& piece : PIECES) {
    if (piece.image && std::find(names.begin(), names.end(), piece.image) == names.end())
      names.emplace_back(piece.image);
  }
  return names;
}

}  // namespace archflash
