"""Calls on DTensors: how the operators are split among the devices of a mesh.

PyTorch asks an operator's strategy on which placements of its arguments it can work without a look
at what other devices have. Attention can where a device has whole batches, or the heads of k and v
with all the heads of q that read them. PyTorch redistributes arguments that are placed otherwise:
rows are gathered, and partial sums are added up.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._errors import UnsupportedError

# How one dimension of a mesh splits a call: not at all, batches, heads of q together with those of
# k and v, or heads of q that all read the one head of k and v.
_WHOLE, _BATCH, _HEADS, _HEADS_OF_Q = "whole", "batch", "heads", "heads of q"
# What the dimensions of options are whose row in the table says so.
_STRIDED = {option.name: option.dimensions for option in _native.call_options()}


def has_dtensor(*tensors: object) -> bool:
    # If the module is not loaded, nobody can have a DTensor. Importing it here would take seconds.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def prepare(options: dict[str, Any], **tensors: Any) -> None:
    """Makes the operators ready for a call on DTensors with these options.

    Raises:
        UnsupportedError: the call drops weights, and its devices would drop different ones.
        TypeError: some tensors of the call are no DTensors.
    """
    if options.get("dropout_p") and not has_dtensor(options["rng_state"]):
        raise UnsupportedError(
            "dropout_p is given with DTensors, and rng_state is none: its random bits would differ "
            "between devices; pass rng_state as a replicated DTensor, or call it on to_local() of "
            "the tensors with a state for each device"
        )
    if not torch.compiler.is_compiling():
        _refuse_plain(tensors | options)
    _register()


def _register() -> None:
    _register_once()


def _refuse_plain(given: dict[str, Any]) -> None:
    """DTensor's own error does not say which tensor it was."""
    from torch.distributed.tensor import DTensor

    if getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False):
        return
    one = next((name for name, x in given.items() if isinstance(x, DTensor)), None)
    if one is None:
        return
    for name, x in given.items():
        # One of a single element is replicated by DTensor itself.
        if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.numel() != 1:
            raise TypeError(
                f"{name} is a plain tensor and {one} is a DTensor: make it one with "
                "distribute_tensor(), replicated or split as that is, or pass to_local() of the "
                "DTensors"
            )


def check_lists(name: str) -> None:
    if not _takes_lists():
        raise UnsupportedError(
            f"{name} of DTensors: this PyTorch has no strategies for operators that take lists of "
            "tensors; use a newer one, or call it on to_local() of tensors that are placed alike"
        )


def _takes_lists() -> bool:
    schema: Any = importlib.import_module("torch.distributed.tensor._op_schema")
    of_list = schema.TupleStrategy([schema.OpStrategy([])])
    leaves: list[Any] = schema.tree_leaves(of_list)
    return leaves[0] is not of_list


# torch.compile takes what such a function returns as a constant, and does not look into it.
_CONSTANTS: tuple[Any, ...] = (_register, _takes_lists)
for _function in _CONSTANTS:
    _function._dynamo_marked_constant = True


@functools.cache
def _register_once() -> None:
    """Tells DTensor the strategies of the operators."""
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.archflash
    for operator, strategy in (
        (operators.attention, _of_attention),
        (operators.attention_with_kvcache, _of_attention),
        (operators.attention_backward, _of_backward),
        (operators.merge_attention, _of_merge),
        (operators.quantize_fp8, _of_quantize),
    ):
        names = [argument.name for argument in operator.default._schema.arguments]
        register_sharding(operator.default)(functools.partial(_by_name, strategy, names))
    _register_pytorchs(register_sharding)


def _register_pytorchs(register_sharding: Any) -> None:
    """Gives the operator that serves SDPA on the CPU a strategy, as PyTorch's others have one."""
    from torch.distributed.tensor import DTensor

    name = "_scaled_dot_product_flash_attention_for_cpu"
    operator = getattr(torch.ops.aten, name, None)
    backward = getattr(torch.ops.aten, f"{name}_backward", None)
    known = getattr(DTensor._op_dispatcher.sharding_propagator, "op_strategy_funcs", {})
    if operator is not None and operator.default not in known:
        register_sharding(operator.default)(_of_sdpa_on_cpu)
    if backward is not None and backward.default not in known:
        register_sharding(backward.default)(_of_sdpa_backward_on_cpu)


def register_if_loaded() -> None:
    """Registers the strategies if DTensor is loaded."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


# --- strategies: lists of (placements of the results, placements of the tensors given) ---

_Strategies = list[tuple[list[Any], list[Any]]]


def _by_name(
    strategy: Callable[[dict[str, Any]], _Strategies], names: list[str], *args: Any, **kwargs: Any
) -> _Strategies:
    return strategy(dict(zip(names, args, strict=False)) | kwargs)


class _Call:
    """A call of attention, its gradients or with a cache: its tensors are placed by name.

    Attributes:
        tensors: what has a shape among the arguments, by name.
        splits: those of `_WHOLE` and so on that are possible.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.tensors = {n: x for n, x in arguments.items() if hasattr(x, "shape")}
        names = ("q", "k_cache") if "k_cache" in arguments else ("q", "k")
        q, k = (self.tensors[name] for name in names)
        self.cached = "k_cache" in arguments
        self.packed = arguments["cu_seqlens_q"] is not None
        heads = 1 if arguments["layout"] == "bhnd" else 2
        self.heads_dim = 1 if self.packed else heads
        self.heads_dim_kv = 1 if self.packed and not self.cached else heads
        self.batch = None if self.packed else q.shape[0]
        self.heads_q, self.heads_kv = q.shape[self.heads_dim], k.shape[self.heads_dim_kv]
        self.splits = [_WHOLE]
        if arguments.get("dropout_p"):
            return  # which weights are dropped depends on the place in the whole call
        # The sequences of a batch share pages, and what cache_batch_idx names.
        shared = any(arguments.get(x) is not None for x in ("page_table", "cache_batch_idx"))
        if not self.packed and not shared:
            self.splits.append(_BATCH)
        if _splits_evenly(self.heads_kv, _sizes_of_mesh(q)):
            self.splits.append(_HEADS)
        elif self.heads_kv == 1:
            self.splits.append(_HEADS_OF_Q)

    def axes(self, name: str) -> tuple[int | None, int | None]:
        """The dimensions of batches and of heads in a tensor of the call."""
        x = self.tensors[name]
        batched = None if self.packed else 0
        if name in ("q", "dout", "out", "qv"):
            return batched, self.heads_dim
        if name in ("k", "v", "k_cache", "v_cache", "k_new", "v_new"):
            return batched, self.heads_dim_kv
        if name in ("lse", "dlse"):
            return batched, 0 if self.packed else 1
        if name == "sinks":
            return None, 0
        if name in ("q_offset_tensor", "cache_seqlens", "leftpad_k"):
            return batched, None
        if name == "attn_mask":
            return self._if_whole(x, x.ndim - 4, self.batch), self._if_whole(
                x, x.ndim - 3, self.heads_q
            )
        if name == "key_ranges":
            return self._if_whole(x, 0, self.batch), self._if_whole(x, 1, self.heads_q)
        if name in ("key_indices", "topk_lengths"):
            return self._if_whole(x, 0, self.batch), self._if_whole(x, 1, self.heads_kv)
        if dimensions := _STRIDED.get(name):
            given = dimensions[len(dimensions) - x.ndim :]
            places = {what: axis for axis, what in enumerate(given)}
            return self._if_whole(x, places.get("batch", -1), self.batch), self._if_whole(
                x, places.get("heads_q", -1), self.heads_q
            )
        if name in ("q_descale", "k_descale", "v_descale"):
            if x.ndim == 0 or tuple(x.shape) == (1,):
                return None, None
            if x.ndim == 4:  # block scales, laid out as what they belong to
                return batched, self.heads_dim if name == "q_descale" else self.heads_dim_kv
            return (batched if x.ndim > 1 else None), min(x.ndim - 1, 1)
        return None, None  # cumulated lengths, tables of positions and the state of dropout

    @staticmethod
    def _if_whole(x: Any, axis: int, size: int | None) -> int | None:
        """The dimension, unless the tensor lacks it or has one number for all."""
        return axis if axis >= 0 and size is not None and x.shape[axis] == size else None

    def axis(self, name: str, split: str) -> int | None:
        """The dimension of a tensor along which a split splits it."""
        batch, heads = self.axes(name)
        if split == _BATCH:
            return batch
        if split == _HEADS:
            return heads
        if split == _HEADS_OF_Q and heads is not None:
            return heads if self.tensors[name].shape[heads] == self.heads_q else None
        return None

    def place(self, name: str, split: str) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        axis = self.axis(name, split)
        return Replicate() if axis is None else Shard(axis)

    def inputs(self, split: str) -> list[Any]:
        return [self.place(name, split) for name in self.tensors]

    def outputs(self, split: str, return_lse: bool) -> list[Any]:
        """Of the output, which is placed as q is, and of the log-sum-exp."""
        from torch.distributed.tensor import Replicate, Shard

        lse: Any = Replicate()
        if return_lse and split == _BATCH:
            lse = Shard(0)
        elif return_lse and split != _WHOLE:
            lse = Shard(0 if self.packed else 1)
        return [self.place("q", split), lse]


def _sizes_of_mesh(x: Any) -> list[int]:
    """The sizes of the mesh of a DTensor, or of what stands for one in a strategy."""
    mesh = x.device_mesh if has_dtensor(x) else x.mesh
    return [mesh.size(i) for i in range(mesh.ndim)]  # torch.compile does not know mesh.shape


def _splits_evenly(heads: int, sizes: Sequence[int]) -> bool:
    """Whether however many dimensions of a mesh of these sizes split the heads, each device gets as
    many. What has fewer heads than devices is never split.
    """
    products = [1]
    for size in sizes:
        products = products + [size * product for product in products]
    if heads < min([size for size in sizes if size > 1] or [1]):
        return False
    return all(heads < product or heads % product == 0 for product in products)


def _of_attention(arguments: dict[str, Any]) -> _Strategies:
    if arguments.get("k_new") is not None:
        raise UnsupportedError(
            "a cache that is a DTensor is appended to by archflash.attention_with_kvcache only, "
            "not by its operator"
        )
    call = _Call(arguments)
    return [
        (call.outputs(split, arguments["return_lse"]), call.inputs(split)) for split in call.splits
    ]


def _of_backward(arguments: dict[str, Any]) -> _Strategies:
    from torch.distributed.tensor import Partial, Replicate, Shard

    call = _Call(arguments)
    wants = {"sinks": arguments["sinks"] is not None, "attn_mask": arguments["mask_gradient"]}

    def gradient(name: str, split: str) -> Any:
        """Where a tensor is not split and the call is, the gradients of the parts add up."""
        if split == _WHOLE or not wants.get(name, True):
            return Replicate()
        axis = call.axis(name, split)
        return Partial() if axis is None else Shard(axis)

    return [
        ([gradient(x, split) for x in ("q", "k", "v", "sinks", "attn_mask")], call.inputs(split))
        for split in call.splits
    ]


def _of_merge(arguments: dict[str, Any]) -> _Strategies:
    from torch.distributed.tensor import Replicate, Shard

    outs, lses, heads = arguments["outs"], arguments["lses"], arguments["heads_dim"]
    whole = [Replicate()] * (len(outs) + len(lses))
    strategies: _Strategies = [([Replicate(), Replicate()], whole)]
    packed = outs[0].ndim == 3
    # The dimension of an output, and that of the log-sum-exp which goes with it: each row of each
    # head is merged by itself.
    of_lse = {0: 1, 1: 0} if packed else {0: 0, heads: 1, 3 - heads: 2}
    for axis, axis_lse in of_lse.items():
        placed = [Shard(axis)] * len(outs) + [Shard(axis_lse)] * len(lses)
        strategies.append(([Shard(axis), Shard(axis_lse)], placed))
    return strategies


def _of_quantize(arguments: dict[str, Any]) -> _Strategies:
    from torch.distributed.tensor import Replicate, Shard

    strategies: _Strategies = [([Replicate(), Replicate()], [Replicate()])]
    if arguments["per"] == 0:  # one descale for all
        return strategies
    heads = arguments["heads_dim"]
    of_descale = {1: 0} if arguments["x"].ndim == 3 else {0: 0, heads: 1}
    for axis, axis_descale in of_descale.items():
        strategies.append(([Shard(axis), Shard(axis_descale)], [Shard(axis)]))
    return strategies


def _sdpa_placements(results: int, given: Sequence[Any], q: Any, k: Any) -> _Strategies:
    """Batches or heads of PyTorch's SDPA, all of whose results and tensors have four dimensions but
    the log-sum-exp, whose first two are the same.
    """
    from torch.distributed.tensor import Replicate, Shard

    tensors = [x for x in given if hasattr(x, "shape")]
    strategies: _Strategies = [([Replicate()] * results, [Replicate()] * len(tensors))]
    for axis in (0, 1):
        if axis == 1 and not (
            k.shape[1] == q.shape[1] or _splits_evenly(k.shape[1], _sizes_of_mesh(q))
        ):
            continue
        size = q.shape[axis]
        placed = [
            Replicate() if x.ndim < 3 or x.shape[axis] == 1 != size else Shard(axis)
            for x in tensors
        ]
        strategies.append(([Shard(axis)] * results, placed))
    return strategies


def _of_sdpa_on_cpu(*args: Any, **kwargs: Any) -> _Strategies:
    return _sdpa_placements(2, [*args, *kwargs.values()], args[0], args[1])


def _of_sdpa_backward_on_cpu(*args: Any, **kwargs: Any) -> _Strategies:
    return _sdpa_placements(3, [*args, *kwargs.values()], args[1], args[2])


# --- caches that are appended to ---


def append(
    operator: Callable[..., tuple[Tensor, Tensor]],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """A call that appends to caches, which are DTensors: on what each device has of the caches,
    where they are. They are written in place, so that no strategy may redistribute them.

    Args:
        operator: takes q, the caches and the options, all of them local.
        q, k_cache, v_cache, options: the call.

    Returns:
        What the operator returns, as DTensors.

    Raises:
        TypeError: some tensors of the call are no DTensors.
        ValueError: the caches are placed so that no device can serve its part alone.
    """
    from torch.distributed.tensor import DTensor

    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **options}
    arguments.pop("out")
    tensors: dict[str, Any] = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name} is a plain tensor and the caches are DTensors: make it one with "
                "distribute_tensor(), or pass to_local() of the caches"
            )
    call, mesh = _Call(arguments), k_cache.device_mesh
    splits = []
    for of_k, of_v, devices in zip(
        k_cache.placements, v_cache.placements, _sizes_of_mesh(k_cache), strict=True
    ):
        fitting = [
            split
            for split in call.splits
            if call.place("k_cache", split) == of_k and call.place("v_cache", split) == of_v
        ]
        if not fitting or (fitting[0] == _BATCH and q.shape[0] % devices != 0):
            raise ValueError(
                f"k_cache and v_cache are placed as {k_cache.placements} and {v_cache.placements} "
                "on their mesh, and the call appends to them: both must be replicated, split by "
                "heads of k that divide evenly, or, without page_table and cache_batch_idx, by "
                "batches that do"
            )
        splits.append(fitting[0])
    local = dict(arguments)
    for name, x in tensors.items():
        placements = [call.place(name, split) for split in splits]
        local[name] = x.redistribute(mesh, placements).to_local()
    results = operator(
        local.pop("q"), local.pop("k_cache"), local.pop("v_cache"), {**local, "out": None}
    )
    places = zip(*(call.outputs(split, options["return_lse"]) for split in splits), strict=True)
    out, lse = (
        DTensor.from_local(x, mesh, placed, run_check=False)
        for x, placed in zip(results, places, strict=True)
    )
    return out, lse
