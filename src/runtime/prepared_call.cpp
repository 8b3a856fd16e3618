#include "runtime/prepared_call.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/planning/workspace.h"

namespace archflash {
namespace {

std::optional<Operand> operand_of(const Option& option) {
  return option.kind == OptionKind::Output ? Operand::Out : option.operand;
}

// Which options all layers of a batch have in common.
constexpr auto OF_BATCH = [] {
  std::array<bool, OPTION_COUNT> table{};
  for (int i = 0; i < OPTION_COUNT; ++i)
    table[i] = std::ranges::find(BATCH, ARGUMENTS[i]) != std::end(BATCH);
  return table;
}();

// Holds a flag until the end of a scope.
class Using {
 public:
  explicit Using(bool& flag) : flag_(flag) { flag_ = true; }
  ~Using() { flag_ = false; }

 private:
  bool& flag_;
};

}  // namespace

void PreparedCall::Like::set(nb::handle tensor, const char* name) {
  read_tensor(tensor, name, view);
  align = alignment(view.data);
  std::copy_n(view.shape, view.ndim, shape);
  std::copy_n(view.strides, view.ndim, strides);
}

bool PreparedCall::Like::is_of_kind(const TensorView& other) const {
  return align == alignment(other.data) && view.device_kind == other.device_kind &&
         view.device_index == other.device_index && view.is_float == other.is_float &&
         (!view.is_float || view.dtype == other.dtype) && view.is_int32 == other.is_int32 &&
         view.is_bool == other.is_bool && view.is_int64 == other.is_int64 &&
         view.is_int8 == other.is_int8 && view.is_e8m0 == other.is_e8m0 && other.has_storage &&
         !other.lazy;
}

bool PreparedCall::Like::fits(const TensorView& other) const {
  return view.ndim == other.ndim && std::equal(shape, shape + view.ndim, other.shape) &&
         std::equal(strides, strides + view.ndim, other.strides) && is_of_kind(other);
}

bool PreparedCall::Like::fits_flat(const TensorView& other) const {
  const int heads = view.ndim - 2, columns = view.ndim - 1;
  if (other.ndim != 2 || heads < 1 || other.strides[1] != 1 || strides[columns] != 1 ||
      other.shape[1] != shape[heads] * shape[columns])
    return false;
  if (shape[heads] > 1 && strides[heads] != shape[columns]) return false;
  int64_t rows = 1, stride = other.strides[0];
  for (int i = heads - 1; i >= 0; --i) {
    if (shape[i] > 1 && strides[i] != rows * stride) return false;
    rows *= shape[i];
  }
  return rows == other.shape[0] && is_of_kind(other);
}

bool PreparedCall::replace(nb::handle tensor, const char* name, const Like& like, Operand operand,
                           Call& call, bool same) {
  if (like.align == 0 || !is_plain_tensor(tensor)) return false;
  TensorView view;
  read_tensor(tensor, name, view, same);
  call.addresses[static_cast<int>(operand)] = view.data;
  return like.fits(view);
}

PreparedCall::PreparedCall(const Arguments& arguments, const Call& call,
                           std::shared_ptr<PreparedPlan> plan, Templates like, nb::handle batch,
                           nb::handle implementation)
    : call_(call),
      plan_(std::move(plan)),
      like_(std::move(like)),
      batch_(nb::borrow(batch)),
      implementation_(nb::borrow(implementation)),
      gives_out_(!arguments.out.is_none()) {
  q_.set(arguments.q, "q");
  k_.set(arguments.k, "k_cache");
  v_.set(arguments.v, "v_cache");
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const nb::handle value = arguments.*ARGUMENTS[i];
    const auto operand = operand_of(OPTIONS[i]);
    if (operand && is_plain_tensor(value)) of_options_[i].set(value, OPTIONS[i].name);
    options_.append(operand == Operand::Out ? nb::none() : nb::borrow(value));
  }
  if (!gives_out_ && !call_.problem.want_lse) flat_.out = template_of_flat_out(call_);
}

nb::object PreparedCall::run(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                             nb::handle out, nb::handle batch, nb::handle implementation) const {
  const nb::object no = nb::borrow(Py_NotImplemented);
  Arguments a = arguments_of(q, k, v, options, static_cast<int>(Grad::Off));
  a.out = out;
  set_batch(a, batch);
  const bool same_batch = batch.is(batch_);
  if (!implementation.is(implementation_) || a.out.is_none() == gives_out_) return no;
  Call call = call_;
  bool is_flat = false;
  if (flat_.out.is_valid() && out.is_none() && is_plain_tensor(q)) {
    TensorView view;
    read_tensor(q, "q", view);
    is_flat = q_.fits_flat(view);
    call.addresses[static_cast<int>(Operand::Q)] = view.data;
  }
  const Templates& like = is_flat ? flat_ : like_;
  if ((!is_flat && !replace(q, "q", q_, Operand::Q, call)) ||
      !replace(k, "k_cache", k_, Operand::K, call) || !replace(v, "v_cache", v_, Operand::V, call))
    return no;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    if (same_batch && OF_BATCH[i]) continue;
    const nb::handle value = a.*ARGUMENTS[i];
    const bool is_tensor = of_options_[i].align != 0;
    const bool same = value.is(PyList_GetItem(options_.ptr(), i));
    if (same && !is_tensor) continue;
    const auto operand = operand_of(OPTIONS[i]);
    if (!operand || !replace(value, OPTIONS[i].name, of_options_[i], *operand, call, same))
      return no;
  }
  const LaunchPlan& plan = *plan_->plan;
  if (!same_batch || call.device_index < 0 || plan.workspace_bytes == 0 ||
      Shared::layout(plan).bytes > Shared::MOST_BYTES)
    return archflash::run(*plan_, a, call, like);
  Outputs outputs;
  allocate_outputs(a, call, outputs, like);
  if (!launch_layer(call)) {
    allocate_workspace(plan, a.q, call, outputs, false);
    execute(*plan_, call.addresses, call.device_index, current_stream(call.device_index));
  }
  return results_of(outputs, call);
}

PreparedCall::Shared::Layout PreparedCall::Shared::layout(const LaunchPlan& plan) {
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t first_counters = workspace.whole_bytes();
  workspace.add(counters_of(plan));
  const int64_t of_layer = workspace.whole_bytes() - first_counters;
  return {first_counters, of_layer, first_counters + LAYERS * of_layer};
}

bool PreparedCall::launch_layer(Call& call) const {
  Shared& shared = *shared_;
  if (shared.in_use) return false;
  const Using guard(shared.in_use);
  const auto [first_counters, of_layer, bytes] = Shared::layout(*plan_->plan);
  void* stream = current_stream(call.device_index);
  const auto capture = capture_of(stream);
  if (!capture) return false;
  if (!shared.bytes || shared.stream != stream || shared.capture != *capture) {
    shared.bytes.reset();
    auto made = std::make_unique<DeviceBytes>();
    if (!made->allocate(call.device_index, bytes)) return false;
    shared.bytes = std::move(made);
    shared.stream = stream, shared.capture = *capture, shared.next = 0;
  }
  const int64_t layer = shared.next;
  char* const start = static_cast<char*>(shared.bytes->data());
  call.addresses[static_cast<int>(Operand::Workspace)] = start;
  char* const counters = start + first_counters + layer * of_layer;
  shared.next = 0;  // if this layer fails, the next one makes the launches that serve them all
  {
    const nb::gil_scoped_release release;
    execute_layer(*plan_, call.addresses, call.device_index, stream, counters, layer == 0,
                  layer == 0 ? Shared::LAYERS * of_layer : 0);
  }
  shared.next = (layer + 1) % Shared::LAYERS;
  return true;
}

}  // namespace archflash
