#include <nanobind/stl/string.h>

#include <utility>

#include "runtime/bindings/bindings.h"
#include "runtime/call_path.h"
#include "runtime/gradient_path.h"
#include "runtime/operator_path.h"
#include "runtime/plan_cache.h"
#include "runtime/prepared_call.h"
#include "runtime/recorded_call.h"
#include "runtime/run_plan.h"
#include "torch_operators/operators.h"

namespace archflash {

void bind_calls(nb::module_& m) {
  using namespace nb::literals;
  m.def("set_decide", &set_decide, "function"_a, "order"_a.none() = nb::none());
  m.def("set_decide_pytorchs", &set_decide_pytorchs, "function"_a);
  m.def(
      "set_simulate", [](nb::object function) { simulate() = std::move(function); }, "function"_a);
  m.def("attention", &attention, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a, "grad"_a,
        "implementation"_a.none(),
        "Serves an eager call from a kernel, which autograd records where it is to. None when "
        "`torch` is to serve it; NotImplemented for torch's dispatcher, and for lazy tensors, "
        "which must be resolved first.");
  nb::class_<PreparedCall>(m, "PreparedCall",
                           "A call that is made again with other tensors of the same shapes.")
      .def("__call__", &PreparedCall::run, "q"_a, "k"_a, "v"_a, "options"_a, "out"_a.none(),
           "batch"_a, "implementation"_a.none(),
           "What `attention` returns; NotImplemented where the call has to be read as a whole. "
           "`out` and `batch`, (cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table), stand for "
           "those of the options.");
  m.def("prepare_call", &prepare_call, "q"_a, "k"_a, "v"_a, "options"_a, "batch"_a,
        "implementation"_a.none(),
        "A PreparedCall of a call of attention_with_kvcache that `attention` served just now, "
        "without gradients; None where no kernel serves it.");
  m.def("set_record", &set_record, "function"_a, "deterministic"_a);
  m.def("set_decide_gradients", &set_decide_gradients, "function"_a, "order"_a.none() = nb::none());
  m.def(
      "attention_backward",
      [](nb::handle dout, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
         nb::handle dlse, nb::handle options, nb::handle implementation, nb::handle dq,
         nb::handle dk, nb::handle dv, bool accumulate, bool mask_gradient, bool deterministic,
         bool refuse_recorded) {
        return attention_backward({.dout = dout,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .out = out,
                                   .lse = lse,
                                   .dlse = dlse,
                                   .options = options,
                                   .implementation = implementation,
                                   .dq = dq,
                                   .dk = dk,
                                   .dv = dv,
                                   .accumulate = accumulate,
                                   .mask_gradient = mask_gradient,
                                   .deterministic = deterministic,
                                   .refuse_recorded = refuse_recorded});
      },
      "dout"_a.none(), "q"_a.none(), "k"_a.none(), "v"_a.none(), "out"_a.none(), "lse"_a.none(),
      "dlse"_a.none(), "options"_a, "implementation"_a.none(), "dq"_a.none(), "dk"_a.none(),
      "dv"_a.none(), "accumulate"_a, "mask_gradient"_a, "deterministic"_a, "refuse_recorded"_a,
      "Gradients by a kernel: (dq, dk, dv, dsinks, dmask), of which the last two may be None. "
      "NotImplemented where Python is to serve the call, or to refuse it. 'refuse_recorded': also "
      "where a tensor requires a gradient.");
  m.def("recorded_backward", &recorded_backward, "dout"_a, "dlse"_a.none(), "saved"_a, "call"_a,
        "needed"_a, "deterministic"_a, "keep"_a = false,
        nb::sig("def recorded_backward(dout: typing.Any, dlse: typing.Any, saved: "
                "tuple[typing.Any, ...], call: tuple[typing.Any, ...], needed: tuple[bool, ...], "
                "deterministic: bool, keep: bool = False) -> typing.Any"),
        "What autograd's node returns, from the gradients of its output and log-sum-exp, its "
        "tensors, what it was told and what is needed; NotImplemented as attention_backward. "
        "'keep': the operator that is being served is served like that from now on.");
  m.def("set_decide_operator", &set_decide_operator, "function"_a);
  m.def("serve_operator", &serve_operator, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a,
        "implementation"_a.none(), "rows_before_heads"_a = false, "lse_column"_a = false,
        nb::sig("def serve_operator(q: typing.Any, k: typing.Any, v: typing.Any, options: "
                "tuple[typing.Any, ...], implementation: str | None, rows_before_heads: bool = "
                "False, lse_column: bool = False) -> typing.Any"),
        "Serves a call of one of PyTorch's operators from a kernel; what `attention` would return. "
        "Or the reason why PyTorch's own kernel is to serve it, a str; or None where `out` has to "
        "be given, because q repeats rows. With lse_column the log-sum-exp has a last dimension of "
        "size 1.");
  m.def(
      "cache_info",
      [] {
        const auto [hits, misses] = hits_and_misses();
        return nb::make_tuple(hits, misses, cached_calls(), PLAN_CACHE_CAPACITY);
      },
      nb::sig("def cache_info() -> tuple[int, int, int, int]"),
      "(hits, misses, entries, capacity) of the plan cache.");
  m.def("clear_cache", [] {
    clear_cached_calls();
    forget_operator_calls();
  });
  m.def("use_exchange_table", &use_exchange_table, "enabled"_a,
        "Reads tensors through torch's DLPack exchange table (default), or through their Python "
        "attributes.");
  m.def("has_exchange_table", [] { return torch().exchange != nullptr; });
  m.def("is_plain_tensor", [](nb::handle object) { return is_plain_tensor(object); }, "object"_a);
  m.def(
      "all_plain",
      [](const nb::args& objects) {
        for (const nb::handle object : objects) {
          if (needs_dispatcher(object)) return false;
        }
        return true;
      },
      nb::sig("def all_plain(*objects: typing.Any) -> bool"),
      "Whether no argument is a subclass of torch.Tensor (but torch.nn.Parameter).");
  m.def(
      "check_data",
      [](nb::handle tensor, const std::string& name) {
        TensorView view;
        read_tensor(tensor, name.c_str(), view);
      },
      "tensor"_a.none(), "name"_a, "Refuses what is no dense tensor, or has elements but no data.");
  m.def(
      "given", [](nb::handle value) { return given(value); }, "value"_a.none(),
      "What a caller gave, for an error message: never the values of a tensor.");
}

}  // namespace archflash
