"""The order in which the implementations are asked to serve a call, and the kernels that serve some
calls only where they are forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeGuard

from archflash import _archflash as _native
from archflash import _calibrated, _measured, _registry
from archflash._dispatch import pytorch


def of(
    problem: _native.Problem,
    capability: tuple[int, int] | None,
    device: _native.Device | None = None,
) -> tuple[str, ...]:
    """The implementations in the order in which they are asked. Those that take the dtype come
    first, by what the user measured on this very GPU, else by measured speed if this kind of
    problem was measured on such a GPU, else by expected speed.

    Args:
        problem: the call.
        capability: compute capability of the GPU.
        device: the GPU, where the user may have measured it.
    """
    usual = _usual(problem, capability)
    calibrated = _calibrated.find(problem, device)
    if device is None or calibrated is None:
        return usual
    return by_calibration(problem, device, calibrated, usual)


def by_calibration(
    problem: _native.Problem,
    device: _native.Device,
    calibrated: _calibrated.Prediction,
    usual: tuple[str, ...],
) -> tuple[str, ...]:
    """The usual order, changed by the times on this GPU: first what was measured there, by its
    speed. Where `torch` would not serve the call as it was measured, it stays behind the kernels
    that it is usually behind of.
    """

    measured = _measured.find(problem, device.capability) is not None

    def arranged(names: tuple[str, ...]) -> tuple[str, ...]:
        order = calibrated.in_order(names, measured)
        return (*order, *(name for name in names if name not in order))

    torch = usual.index(_registry.TORCH)
    if pytorchs := pytorch.as_calibrated(problem, device.capability, calibrated):
        order = arranged((*usual[:torch], pytorchs, *usual[torch + 1 :]))
        return tuple(_registry.TORCH if name == pytorchs else name for name in order)
    before, kernels = usual[:torch], arranged((*usual[:torch], *usual[torch + 1 :]))
    kernel = pytorch.kernel_of(problem, device.capability)
    if {kernel if isinstance(kernel, str) else "", _registry.TORCH} & calibrated.wrong:
        return (*kernels, _registry.TORCH)
    # What is faster than a kernel that comes before `torch` comes before it, too.
    last = max((kernels.index(name) for name in before if name in calibrated.cost), default=-1)
    first = (*kernels[: last + 1], *(x for x in kernels[last + 1 :] if x in before))
    return (*first, _registry.TORCH, *(name for name in kernels if name not in first))


def _usual(problem: _native.Problem, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The order without what the user measured."""
    measured = _measured.find(problem, capability)
    kernels = _kernels_in_order(problem, capability, measured.order if measured else ())
    if problem.batch_invariant:  # `torch` is no answer then: any kernel is one before it
        tensor_cores = [name for name in kernels if _registry.uses_tensor_cores(name)]
        others = [name for name in kernels if name not in tensor_cores]
        return (*tensor_cores, *others, _registry.TORCH)
    pytorchs = pytorch.chosen_kernel(problem, capability)
    if isinstance(pytorchs, str) and pytorch.fails(problem, capability, pytorchs):
        return _before_pytorch(problem, capability, kernels)
    # From here on `torch` uses what PyTorch itself uses.
    if problem.needs_grad and (rival := pytorch.differentiates(problem, capability, pytorchs)):
        if dense_mask_of_few_rows(problem):
            faster = [name for name in kernels if _registry.uses_tensor_cores(name)]
        elif dense_mask_alone(problem):
            faster = [name for name in kernels if _registry.reads_masks_faster(name, capability)]
        elif fp32_is_faster_with_gradients(problem, capability, rival):
            faster = [name for name in kernels if not _registry.uses_tensor_cores(name)]
        else:
            faster = _faster_with_gradients(problem, kernels, measured, rival)
        return (*faster, _registry.TORCH, *(name for name in kernels if name not in faster))
    if problem.dtype == "float32":
        if pytorch_is_faster_in_fp32(problem, capability):
            return (_registry.TORCH, *kernels)
        return (*kernels, _registry.TORCH)
    tensor_cores = [name for name in kernels if _registry.uses_tensor_cores(name)]
    cuda_cores = [name for name in kernels if not _registry.uses_tensor_cores(name)]
    if isinstance(pytorchs, list):
        return (*tensor_cores, *cuda_cores, _registry.TORCH)
    if dense_mask_of_few_rows(problem):
        return (*tensor_cores, _registry.TORCH, *cuda_cores)
    if dense_mask_alone(problem):
        # They say no where they were not measured to be faster (only_forced).
        faster = [name for name in kernels if _registry.reads_masks_faster(name, capability)]
        others = [name for name in kernels if name not in faster]
        return (*faster, _registry.TORCH, *others)
    if measured is not None and pytorch.serves_as_measured(pytorchs, problem, measured):
        place = measured.place(pytorchs)
        before = [name for name in kernels if measured.place(name) < place]
        after = [name for name in kernels if name not in before]
        return (*before, _registry.TORCH, *after)
    if problem.nq <= _measured.FEW_QUERIES and pytorch.may_serve(problem):
        splitting = [name for name in tensor_cores if _registry.splits_keys(name)]
        others = [name for name in tensor_cores if name not in splitting]
        # PyTorch's fused kernels also split the keys over the GPU. With one query row on an H200
        # that is 1.8 to 17 times faster than a kernel that does not (bench/results).
        return (*splitting, _registry.TORCH, *others, *cuda_cores)
    if capability is not None and pytorch_is_faster_than_mma_sync(pytorchs, problem, capability):
        own = [name for name in tensor_cores if _registry.uses_own_instructions(name, capability)]
        others = [name for name in tensor_cores if name not in own]
        return (*own, _registry.TORCH, *others, *cuda_cores)
    return (*tensor_cores, _registry.TORCH, *cuda_cores)


def _before_pytorch(
    problem: _native.Problem, capability: tuple[int, int] | None, kernels: Sequence[str]
) -> tuple[str, ...]:
    """The order where PyTorch's own choice fails. `torch` keeps from it, and comes before kernels
    without tensor cores if another fused kernel of PyTorch remains.
    """
    if isinstance(pytorch.kernel_of(problem, capability), list):
        return (*kernels, _registry.TORCH)
    cuda_cores = [name for name in kernels if not _registry.uses_tensor_cores(name)]
    others = [name for name in kernels if name not in cuda_cores]
    return (*others, _registry.TORCH, *cuda_cores)


def pytorch_is_faster_than_mma_sync(
    pytorchs: str | list[str], problem: _native.Problem, capability: tuple[int, int]
) -> TypeGuard[str]:
    """Whether PyTorch's kernel for a problem is expected to be faster than ours of mma.sync: on
    10.x and 11.0, whose tensor cores mma.sync leaves mostly idle, for calls that PyTorch serves as
    they are. Where it would need a mask of all scores, ours are, because they skip hidden keys.
    """
    plain = pytorch.may_serve(problem) and not problem.masked and not pytorch.needs_mask(problem)
    return capability[0] in (10, 11) and plain and pytorchs in ("torch-cudnn", "torch-flash")


# Query rows of all heads whose tiles of 128 fill an H200, for fp32 of more than 128 columns.
_ROWS_THAT_FILL = 16384


def _is_plain_for_memory_efficient(problem: _native.Problem, capability: tuple[int, int]) -> bool:
    """Whether PyTorch's memory-efficient kernel serves a call of many rows as it is."""
    plain = not problem.masked and not pytorch.needs_mask(problem) and pytorch.may_serve(problem)
    return (
        plain
        and problem.nq > _measured.FEW_QUERIES
        and pytorch.differentiates(problem, capability) == "torch-efficient"
    )


def pytorch_is_faster_in_fp32(problem: _native.Problem, capability: tuple[int, int] | None) -> bool:
    """Whether PyTorch's memory-efficient kernel, of three TF32 products, is faster without
    gradients than ours. Measured on an H200, 2026-11-29: above 256 columns ours has 0.5 to 0.8 of
    its speed; above 128 1.0 to 1.5 where the rows of all heads fill the GPU, else 0.6 to 1.06; with
    a causal mask 1.1 to 1.8, and 0.85 at 200 rows. On 8.0 three such products have 2.7 times the
    highest rate of one in fp32 (52 and 19.5 TFLOP/s on an A100, where neither was timed), and ours
    are in fp32; on 8.6 and 8.9 they have a third of it.
    """
    columns = max(problem.d, problem.dv)
    if columns <= 256 and capability == (8, 0):
        return _is_plain_for_memory_efficient(problem, capability)
    if columns <= 128 or columns > 256 or capability != (9, 0):
        return columns > 256
    if problem.batch * problem.heads_q * problem.nq >= _ROWS_THAT_FILL:
        return False
    dense = not (problem.causal or problem.masked or pytorch.needs_mask(problem))
    few = dense or (not problem.masked and problem.nq <= 256)
    return few and pytorch.differentiates(problem, capability) == "torch-efficient"


def fp32_is_faster_with_gradients(
    problem: _native.Problem, capability: tuple[int, int] | None, pytorchs: str
) -> bool:
    """Whether fp32 of more than 128 columns is computed with its gradients faster by us than by
    PyTorch. Measured on an H200, 2026-11-29: 1.1 to 1.45 times as fast where the rows of all heads
    fill the GPU, else 0.92 to 1.28.
    """
    columns = max(problem.d, problem.dv)
    wide = problem.dtype == "float32" and 128 < columns <= 256 and capability == (9, 0)
    if not wide or pytorchs != "torch-efficient" or min(problem.nq, problem.nk) < 64:
        return False
    if problem.masked or not pytorch.may_serve(problem):
        return False
    return problem.batch * problem.heads_q * problem.nq >= _ROWS_THAT_FILL


def _faster_with_gradients(
    problem: _native.Problem,
    kernels: Sequence[str],
    measured: _measured.Measurement | None,
    pytorchs: str,
) -> list[str]:
    """The kernels that computed such a call and its gradients faster than the kernel that PyTorch
    has for it, where both were measured. A causal mask that PyTorch's kernel has to read, because
    there are other numbers of queries and keys, was not measured; it only makes it slower.
    """
    if measured is None or pytorchs not in measured.order:
        return []
    if problem.masked or not pytorch.may_serve(problem):
        return []
    place = measured.place(pytorchs)
    return [name for name in kernels if measured.place(name) < place]


def dense_mask_alone(problem: _native.Problem) -> bool:
    """Whether a call has an attn_mask and nothing that says which of its blocks are hidden. On an
    H200 PyTorch's fused kernels serve such calls faster than kernels of mma.sync, the
    memory-efficient one too (docs/masks.md).
    """
    return problem.attn_mask and not (problem.key_ranges or problem.block_mask or problem.dropout_p)


# On an H200 `torch` takes 5 to 9 times as long as kernels of mma.sync up to so many rows of 4,096
# keys (331 and 42 us for one row of 2x16 heads of 128). With gradients it is 8 times on the host
# (1,380 and 162 us for 128 rows and keys).
_FEW_ROWS_OF_A_MASK = 128


def dense_mask_of_few_rows(problem: _native.Problem) -> bool:
    """Whether so few query rows read a dense mask that what `torch` does around PyTorch's kernel,
    which passes over all keys and values, takes longer than any kernel of ours.
    """
    return dense_mask_alone(problem) and problem.nq <= _FEW_ROWS_OF_A_MASK


def decodes_with_mask(problem: _native.Problem) -> bool:
    """Whether the kernels for decoding of `ampere` come first for a call with an attn_mask, as
    measured on an H200 up to 128 columns: its rows that share a head of k and v fit their tiles,
    and warps that share out the keys have some each.
    """
    if not dense_mask_alone(problem) or problem.dtype not in ("float16", "bfloat16"):
        return False
    if problem.varlen or problem.kv_cache or problem.alibi_slopes or problem.batch_invariant:
        return False
    if problem.needs_grad or problem.out_dtype != problem.dtype:
        return False
    rows, heads = problem.nq, problem.heads_q // max(problem.heads_kv, 1)
    tile_rows = (1 << (rows - 1).bit_length()) * (1 << (heads - 1).bit_length())
    few_keys = 128 if rows > 1 else 16
    return tile_rows <= 16 and problem.nk > few_keys and max(problem.d, problem.dv) <= 128


def _kernels_in_order(
    problem: _native.Problem, capability: tuple[int, int] | None, measured: tuple[str, ...]
) -> tuple[str, ...]:
    """Our kernels, in the order of the measured speeds; those that take the dtype come first."""
    home = capability if _has_tiles_for_8_9(problem) else None
    names = _in_order(problem.dtype, home, measured)
    if capability is None or not decodes_with_mask(problem):
        return names
    return tuple(sorted(names, key=lambda name: _registry.uses_own_instructions(name, capability)))


@lru_cache(maxsize=1024)
def _in_order(
    dtype: str, home: tuple[int, int] | None, measured: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(
        sorted(
            _registry.kernel_names(),
            key=lambda name: (
                not _registry.takes(name, dtype),
                measured.index(name) if name in measured else len(measured),
                not _registry.made_for(name, dtype, home),
            ),
        )
    )


def _has_tiles_for_8_9(problem: _native.Problem) -> bool:
    """Whether `ada` has 16-bit kernels that may be faster than those of `ampere`.

    On an H200 with 99 KB of shared memory (2026-11-30) `ampere` had 1.02 to 2.9 times the speed of
    `ada` in all 35 calls whose queries see every key, 1.3 to 2 where tiles are fewer than SMs, 0.95
    to 1.15 in other calls with 128 columns, and 0.91 to 1.04 in those with 48 to 96. Up to 32
    columns it had 1.3 to 1.9, and with values of more than 128 1.03 to 2.4. Calls of (192, 128)
    were not timed beside each other.
    """
    few_tiles, tile_rows = 128, 128
    columns = max(problem.d, problem.dv)
    if columns <= 32 or problem.dv > 128:
        return False
    if problem.batch_invariant:  # the same kernel serves a call whatever its size is
        return True
    if columns > 128:
        return problem.nq > 1
    sees_all = not problem.varlen and not pytorch.needs_mask(problem) and not problem.causal
    plain = sees_all and not problem.softcap and not problem.sinks
    sequences = 1 if problem.varlen else problem.batch
    tiles = sequences * problem.heads_q * -(-problem.nq // tile_rows)
    return columns <= 96 and not plain and tiles > few_tiles


def pytorch_reads_mask_faster(problem: _native.Problem, plan: _native.LaunchPlan) -> bool:
    """Whether PyTorch's own kernel, without what `torch` does around it, was measured to be faster
    with such an attn_mask than the kernel of a plan that would serve the call.
    """
    measured = _measured.find(problem, plan.device.capability) if problem.attn_mask else None
    pytorchs = pytorch.kernel_of(problem, plan.device.capability)
    if isinstance(pytorchs, list):
        return False
    in_place = problem.attn_mask and plan.tile is not None and not plan.tile.summarizes_masks
    if measured is None:
        tuned = _registry.reads_masks_faster(plan.implementation, plan.device.capability)
        return dense_mask_of_few_rows(problem) or (in_place and tuned)
    if dense_mask_of_few_rows(problem) or in_place:
        return True
    return measured.place(pytorchs) < measured.place(plan.implementation)


def _reads_mask_in_place(problem: _native.Problem) -> bool:
    """Whether a kernel that reads an attn_mask without a summary of it is faster than `torch`,
    though mostly not than PyTorch's own kernel: where gradients are needed, where the mask is of
    float32, and in small calls (1x16 heads of 64, 1,024 rows and keys, bool: 38 us beside 84; H200,
    2026-11-30). Few rows, too, of those that `decodes_with_mask` leaves; and masks too large for a
    summary, of which `torch` would make copies of twice their size.
    """
    huge = 1 << 33  # elements: the summary of more of them would take more than 1 GB
    strides = problem.to_dict()["mask_strides"]
    heads = problem.heads_q if strides["head"] else 1
    elements = problem.nq * problem.nk * heads * (problem.batch if strides["batch"] else 1)
    small = problem.batch * problem.heads_q * problem.nq < _measured.SMALL_ROWS
    small = small or dense_mask_of_few_rows(problem)
    small = small and (problem.bool_mask or max(problem.d, problem.dv) <= 128)
    return pytorch.mask_is_wider(problem) or problem.needs_grad or small or elements > huge


def _is_unlisted_mask(problem: _native.Problem, summarizes: bool) -> bool:
    """Whether a call with an attn_mask is of a kind that the table of what was measured does not
    have, but was measured: few rows, and more than 128 columns (2x16 heads of 256,
    1,024 rows and keys, bool: 77 us, SDPA 157, `torch` 344; H200, 2026-11-30).
    """
    if not dense_mask_alone(problem) or problem.dtype not in ("float16", "bfloat16"):
        return False
    if max(problem.d, problem.dv) > 128:
        return summarizes or problem.bool_mask
    return problem.nq <= _measured.FEW_QUERIES


def only_forced(
    name: str,
    problem: _native.Problem,
    capability: tuple[int, int],
    summarizes: bool = False,
    device: _native.Device | None = None,
) -> bool:
    """Whether a kernel serves a problem only if it is forced, because the GPU is of another
    generation than its own and it was measured neither there nor by the user on this very GPU.

    Args:
        name, problem, capability: the kernel, the call and the GPU's compute capability.
        summarizes: whether the kernel's plan summarizes the masks of the call.
        device: the GPU, where the user may have measured it.
    """
    if not _registry.only_forced(name, capability):
        return False
    calibrated = _calibrated.find(problem, device)
    if calibrated is not None and name in calibrated.cost:
        return False
    if problem.kv_cache or problem.key_indices:
        return False  # such a kernel refuses all of these but those that it was measured for
    if problem.dropout_p and (least := _registry.description(name).dropout_rows):
        rows = problem.nq // max(problem.batch, 1) if problem.varlen else problem.nq
        # Gradients of few keys of up to 64 columns: both passes of `ampere` take 0.88 of the time
        # of `hopper` for one tile of keys (32x12 128: 65.5 us of 75, cuDNN 65.6), and 0.88 to 0.96
        # with up to 256 rows and keys (H200, 2026-12-01).
        few = problem.nk <= 128 or max(rows, problem.nk) <= 256
        plain = not problem.varlen and problem.heads_q == problem.heads_kv
        by_mma = few and plain and max(problem.d, problem.dv) <= 64
        return rows < least or (by_mma and problem.needs_grad)
    if problem.attn_mask and problem.block_mask:
        # Without gradients `hopper` took 0.48 to 0.95 of the time of `ampere` in 21 calls of 1 to
        # 4,096 rows, bool and added, where it reads the mask in place (H200, 2026-12-01).
        beside = problem.key_ranges or problem.alibi_slopes or problem.varlen
        return problem.needs_grad or beside
    if problem.attn_mask and not summarizes and not _reads_mask_in_place(problem):
        return True
    if _is_unlisted_mask(problem, summarizes):
        return False
    # Tables of blocks were measured without gradients. Both passes of `hopper` beside those of
    # mma.sync, eager: 0.33 to 0.59 of the time with 2,048 to 16,384 rows, 0.97 to 1.0 with 1,024,
    # 0.95 to 1.16 with 64 to 512 (12 calls; H200, 2026-11-30).
    of_both = _measured.mask_of(problem) != "blocks" or problem.nq < 1024
    measured = _measured.find(problem, capability, with_gradients=of_both)
    return measured is None or name not in measured.order
