"""The one way to have the gradients of a call computed.

The kernels read what the forward pass left (q, k, v, the output and the log-sum-exp) and write dq,
dk, dv and the gradient of the sinks. `torch` computes the call once more and lets autograd
differentiate it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _autocast, _dispatch, _options, _proofs, _registry, _torch
from archflash._gradients import (
    Gradients,
    Request,
    decide_as_computed,
    operands,
    wants_deterministic,
)


def compute(
    request: Request, into: Gradients, name: str | None, deterministic: bool | None
) -> None:
    """Computes the gradients of a call into given tensors.

    Args:
        request: the call.
        into: what is written.
        name: the forced implementation; None for the best.
        deterministic: whether the same inputs must always give the same bits, whoever computes the
            gradients; None: as `wants_deterministic` says.
    """
    if deterministic is None:
        deterministic = wants_deterministic()
    problem = request.problem()
    device, obstacle = _dispatch.device_of(problem, request.q.device.index)
    asked, by_score = request, into
    request, decision = decide_as_computed(asked, into, device, name, obstacle, deterministic)
    if into.dmask is not None and deterministic and not _orders_mask_sums(decision):
        by_score = into.with_dmask_of_all_scores(asked)
        if by_score is not into:
            request, decision = decide_as_computed(
                asked, by_score, device, name, obstacle, deterministic
            )
    if decision.unproved and device is not None:
        _proofs.note(decision.unproved[0], device, decision.chosen)
    if decision.plan is not None:
        _native.launch(decision.plan, operands(request, by_score, decision.plan))
        if into.dmask is not None and by_score.dmask is not None and by_score is not into:
            into.dmask.add_(by_score.dmask.sum_to_size(into.dmask.shape))
        for written in (into.dq, into.dk, into.dv):  # autograd must see that they were written
            if not written.is_inference():
                torch.autograd.graph.increment_version(written)
        return
    if decision.fallback and device is not None:
        kernel, (reason, *_) = _dispatch.nearest(
            {n: r for n, r in decision.reasons.items() if n != _registry.TORCH}, problem, device
        )
        _dispatch.note_fallback(f"{kernel}: {reason}")
    _by_torch(request, into, deterministic)


def _orders_mask_sums(decision: _dispatch.Decision) -> bool:
    """Whether the chosen kernel adds up the gradients of a mask that heads share in order."""
    return decision.plan is not None and decision.plan.orders_mask_sums


def _with_autograd() -> Any:
    """A context with autograd's dispatch keys, which PyTorch leaves out inside of an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def variable(x: Tensor) -> Tensor:
    """A tensor of its own to differentiate by, of which x is the only ancestor."""
    alias = x.view_as(x)
    return alias if alias.requires_grad else alias.requires_grad_()


def by_plain_operations(
    request: Request, wanted: Sequence[str], create_graph: bool
) -> dict[str, Tensor]:
    """Gradients by operations that can be differentiated again, in any mode. They take memory for
    all scores. The output and the log-sum-exp of the request are not read.

    Args:
        request: the call.
        wanted: of which tensors of the call.
        create_graph: whether autograd is to differentiate the gradients.

    Returns:
        The gradients by name, in the dtypes of these tensors, but for those that are 0.
    """
    options = _options.for_torch(request.options) | {"out": None, "return_lse": True}
    call = {"q": request.q, "k": request.k, "v": request.v} | options
    with torch.enable_grad(), _autocast.no_autocast(request.q.device.type):
        leaves = {name: variable(call[name]) for name in wanted}
        answer, given = _torch.attention(**(call | leaves)), [request.dout]  # lse: no fused kernel
        if request.dlse is not None:
            given.append(request.dlse)
        found = torch.autograd.grad(
            answer[: len(given)], list(leaves.values()), given,
            create_graph=create_graph, allow_unused=True,
        )  # fmt: skip
    return {name: x for name, x in zip(leaves, found, strict=True) if x is not None}


def _of_these_keys(request: Request, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the output and log-sum-exp of a call, from those of attention over its keys
    and further ones, whose output and log-sum-exp are the request's (context parallelism):
        output of all = share * output of the call + what the other keys give,
    where share = exp(lse of the call - lse of all), and so does each gradient.

    Args:
        request: the call, with what belongs to all keys.
        out, lse: the output and log-sum-exp of the call.
    """

    rows_first = lse.ndim == 2 or request.options["layout"] == "bnhd"

    def swapped(x: Tensor) -> Tensor:  # between (heads, rows) of lse and the output's order
        return x.transpose(-1, -2) if rows_first else x

    # Without other keys the two differ by rounding only; of an infinite sink both are infinite.
    near = 4 * torch.finfo(lse.dtype).eps * (1 + lse.abs())
    alone = ((lse - request.lse).abs() <= near) | (lse == request.lse)
    share = (lse - request.lse).exp().masked_fill(alone, 1.0).masked_fill(lse == -math.inf, 0.0)
    dout = request.dout.to(torch.promote_types(out.dtype, torch.float32))
    behind = swapped((dout * (out - request.out)).sum(-1)).masked_fill(alone, 0.0)
    dlse = behind if request.dlse is None else behind + request.dlse
    dout = dout * swapped(share)[..., None]
    return dout.to(out.dtype), (share * dlse).to(lse.dtype)


def _outside_of_inference(x: Any) -> Any:
    """A value as it is, or a copy of a tensor of inference mode, which autograd does not keep."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def _by_torch(request: Request, into: Gradients, deterministic: bool) -> None:
    """The gradients by PyTorch: the call is computed once more, for autograd to differentiate."""
    # Float32 gradients, which may be parts of a sum, must not be rounded before. On a GPU that
    # would cost PyTorch its fused kernels.
    is_wide = into.dk.dtype == torch.float32 and not request.q.is_cuda
    inside = torch.float32 if is_wide and request.q.element_size() == 2 else request.q.dtype
    targets = [into.dq, into.dk, into.dv]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        given = (_outside_of_inference(x) for x in (request.q, request.k, request.v))
        leaves = [x.detach().to(inside).requires_grad_() for x in given]
        options = _options.for_torch(request.options) | {"out": None, "return_lse": True}
        options = {name: _outside_of_inference(x) for name, x in options.items()}
        for option, target in (("sinks", into.dsinks), ("attn_mask", into.dmask)):
            if target is not None:
                options[option] = options[option].detach().requires_grad_()
                leaves.append(options[option])
                targets.append(target)
        stack.enter_context(_with_autograd())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_autocast.no_autocast(request.q.device.type))
        if deterministic:  # PyTorch's fused kernels may add in any order
            math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
            stack.enter_context(math_only)
        answer = _torch.attention(*leaves[:3], **options)
        assert not isinstance(answer, Tensor)
        grads = _of_these_keys(request, answer[0].detach(), answer[1].detach())
        found = torch.autograd.grad(answer, leaves, grads, allow_unused=True)
    for target, gradient in zip(targets, found, strict=True):
        if target is into.dmask:
            gradient = None if gradient is None else gradient.reshape(target.shape)
        if target is into.dsinks or target is into.dmask or not into.accumulate:
            target.zero_() if gradient is None else target.copy_(gradient)
        elif gradient is not None:
            target.add_(gradient)
