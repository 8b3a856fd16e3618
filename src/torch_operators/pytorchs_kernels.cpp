#include "torch_operators/pytorchs_kernels.h"

#include <array>

#include "torch_operators/torch_functions.h"

namespace archflash::torch_operators {

namespace {

// A view of a tensor (B, H, N, D) as (B, N, H, D), or the other way round.
HeldTensor with_heads_swapped(TensorHandle tensor) {
  const TorchFunctions& f = *torch_functions();
  int64_t *sizes = nullptr, *strides = nullptr;
  check(f.get_sizes(tensor, &sizes));
  check(f.get_strides(tensor, &strides));
  const int64_t shape[] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const int64_t steps[] = {strides[0], strides[2], strides[1], strides[3]};
  HeldTensor swapped;
  check(f.reinterpret_tensor(tensor, 4, shape, steps, 0, swapped.out()));
  return swapped;
}

// Calls PyTorch's own kernel for packed sequences, _flash_attention_forward.
void call_original_packed(const Operator& op, const OperatorArguments& a, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  std::array<HeldTensor, 5> r;
  std::array<TensorHandle, MAX_ARGUMENTS> handles{};
  std::array<Word, MAX_ARGUMENTS> numbers{};
  for (size_t i = 0; i < op.types.size(); ++i)
    handles[i] = a[i].tensor.get(), numbers[i] = a[i].bits;
  const auto tensor = [&](size_t i) { return a[i].given ? &handles[i] : nullptr; };
  const auto integer = [&](size_t i) {
    return a[i].given ? reinterpret_cast<int64_t*>(&numbers[i]) : nullptr;
  };
  const auto max_q = static_cast<int64_t>(a[5].bits), max_k = static_cast<int64_t>(a[6].bits);
  const double dropout = as_double(a[7].bits);
  const auto causal = static_cast<int32_t>(a[8].bits), debug = static_cast<int32_t>(a[9].bits);
  double scale = as_double(a[10].bits);
  double* const scale_if_given = a[10].given ? &scale : nullptr;
  if (op.types.size() == PACKED_WITH_PAGES.size()) {
    check(f.flash_forward_v2(handles[0], handles[1], handles[2], tensor(3), tensor(4), max_q, max_k,
                             dropout, causal, debug, scale_if_given, integer(11), integer(12),
                             tensor(13), tensor(14), tensor(15), integer(16), r[0].out(),
                             r[1].out(), r[2].out(), r[3].out(), r[4].out()));
  } else {
    check(f.flash_forward(handles[0], handles[1], handles[2], tensor(3), tensor(4), max_q, max_k,
                          dropout, causal, debug, scale_if_given, integer(11), integer(12),
                          tensor(13), tensor(14), r[0].out(), r[1].out(), r[2].out(), r[3].out(),
                          r[4].out()));
  }
  for (size_t i = 0; i < r.size(); ++i) stack[i] = reinterpret_cast<Word>(r[i].release());
}

// Calls PyTorch's own kernel of a backward operator.
void call_original_backward(const Operator& op, const OperatorArguments& a, Word* stack) {
  const TorchFunctions& f = *torch_functions();
  std::array<HeldTensor, 3> r;
  std::array<TensorHandle, MAX_ARGUMENTS> t{};
  for (size_t i = 0; i < op.types.size(); ++i) t[i] = a[i].tensor.get();
  const auto integer = [&](size_t i) { return static_cast<int64_t>(a[i].bits); };
  const bool cudnn = op.known == Known::CudnnBackward, swaps = op.known == Known::FlashBackward;
  const size_t scale_at = cudnn ? 15 : 14;
  double scale = as_double(a[scale_at].bits);
  double* const scale_if_given = a[scale_at].given ? &scale : nullptr;
  if (cudnn) {
    check(f.cudnn_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10],
                           integer(11), integer(12), as_double(a[13].bits),
                           static_cast<int32_t>(a[14].bits), scale_if_given, r[0].out(), r[1].out(),
                           r[2].out()));
  } else {
    // As in the forward pass, PyTorch's kernel for SDPA swaps heads and rows and calls
    // _flash_attention_backward, whose kernel is called directly here.
    std::array<HeldTensor, 5> swapped;
    for (size_t i = 0; swaps && i < swapped.size(); ++i) {
      swapped[i] = with_heads_swapped(t[i]);
      t[i] = swapped[i].get();
    }
    std::array<int64_t, 2> window{};
    std::array<int64_t*, 2> window_if_given{};
    for (size_t i = 0; !swaps && i < 2; ++i) {
      window[i] = integer(15 + i);
      if (a[15 + i].given) window_if_given[i] = &window[i];
    }
    check(f.flash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], integer(8), integer(9),
                           as_double(a[10].bits), static_cast<int32_t>(a[11].bits), t[12], t[13],
                           scale_if_given, window_if_given[0], window_if_given[1], r[0].out(),
                           r[1].out(), r[2].out()));
    for (size_t i = 0; swaps && i < r.size(); ++i) r[i] = with_heads_swapped(r[i].get());
  }
  for (size_t i = 0; i < r.size(); ++i) stack[i] = reinterpret_cast<Word>(r[i].release());
}

}  // namespace

void call_original(const Operator& op, const OperatorArguments& a, Word* stack) {
  if (op.known == Known::Packed) return call_original_packed(op, a, stack);
  if (is_backward(op.known)) return call_original_backward(op, a, stack);
  const TorchFunctions& f = *torch_functions();
  const TensorHandle q = a[0].tensor.get(), k = a[1].tensor.get(), v = a[2].tensor.get();
  std::array<HeldTensor, MAX_RESULTS> r;
  int64_t nq = 0, nk = 0;
  const Argument& last = a[op.types.size() - 1];
  double scale = as_double(last.bits);
  double* const scale_if_given = last.given ? &scale : nullptr;
  const auto number = [&](size_t i) { return as_double(a[i].bits); };
  const auto flag = [&](size_t i) { return static_cast<int32_t>(a[i].bits); };
  const auto give = [&](int i) { stack[i] = reinterpret_cast<Word>(r[i].release()); };
  TensorHandle mask = a[3].tensor.get();
  TensorHandle* const mask_if_given = mask == nullptr ? nullptr : &mask;
  if (op.known == Known::Efficient) {
    check(f.efficient(q, k, v, mask_if_given, flag(4), number(5), flag(6), scale_if_given,
                      r[0].out(), r[1].out(), r[2].out(), r[3].out()));
    for (int i = 0; i < 4; ++i) give(i);
    return;
  }
  if (op.known == Known::Flash) {
    // PyTorch's kernel of this operator swaps heads and rows and calls _flash_attention_forward,
    // which archflash replaces too: here its kernel is called directly.
    int64_t *of_q = nullptr, *of_k = nullptr;
    check(f.get_sizes(q, &of_q));
    check(f.get_sizes(k, &of_k));
    nq = of_q[2], nk = of_k[2];
    const HeldTensor rows_q = with_heads_swapped(q), rows_k = with_heads_swapped(k),
                     rows_v = with_heads_swapped(v);
    HeldTensor out;
    check(f.flash_forward(rows_q.get(), rows_k.get(), rows_v.get(), nullptr, nullptr, nq, nk,
                          number(3), flag(4), flag(5), scale_if_given, nullptr, nullptr, nullptr,
                          nullptr, out.out(), r[1].out(), r[6].out(), r[7].out(), r[8].out()));
    r[0] = with_heads_swapped(out.get());
    for (const int i : {2, 3}) check(f.new_uninitialized_tensor(r[i].out()));
  } else {
    check(f.cudnn(q, k, v, mask_if_given, flag(4), number(5), flag(6), flag(7), scale_if_given,
                  r[0].out(), r[1].out(), r[2].out(), r[3].out(), &nq, &nk, r[6].out(), r[7].out(),
                  r[8].out()));
  }
  for (const int i : {0, 1, 2, 3, 6, 7, 8}) give(i);
  stack[4] = static_cast<Word>(nq), stack[5] = static_cast<Word>(nk);
}

}  // namespace archflash::torch_operators
