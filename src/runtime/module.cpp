// The extension module archflash._archflash. What it offers stands in runtime/bindings, a subject
// in each file.
#include <string>

#include "common/block_scales.h"
#include "common/mask_params.h"
#include "runtime/bindings/bindings.h"
#include "runtime/call.h"
#include "runtime/execute.h"
#include "torch_operators/node.h"
#include "torch_operators/operators.h"

namespace archflash {

NB_MODULE(_archflash, m) {
  m.doc() =
      "archflash's runtime: plans, bound launches and the kernels themselves, without torch or a "
      "GPU at import.";
  m.attr("version") = ARCHFLASH_VERSION;
  m.attr("SCALE_ROWS") = SCALE_ROWS;
  m.attr("SCALED_NUMBERS") = SCALED_NUMBERS;
  m.attr("MASK_BLOCK") = MASK_BLOCK;
  m.attr("MOST_RANGES") = MOST_RANGES;
  m.attr("IS_LAZY") = IS_LAZY;
  nb::set_leak_warnings(false);  // what the caches hold lives as long as the process

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const LaunchFailure& failure) {
      PyErr_SetString(nb::module_::import_("archflash._errors").attr("LaunchError").ptr(),
                      failure.what());
    } catch (const Unsupported& refusal) {
      PyErr_SetString(nb::module_::import_("archflash._errors").attr("UnsupportedError").ptr(),
                      refusal.what());
    }
  });

  bind_options(m);
  bind_problem(m);
  bind_plan(m);
  bind_walks(m);
  bind_registry(m);
  bind_calls(m);
  bind_operators(m);
  bind_node(m);
  bind_plans_on_tensors(m);
  bind_functions(m);
}

}  // namespace archflash
