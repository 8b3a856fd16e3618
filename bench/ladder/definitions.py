"""The ladders: their rungs, what each one adds, and what is known about their speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bench.cases import Case

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Maps:
    """The boxes that the tensor maps of a rung copy.

    Attributes:
        swizzle: bytes of the swizzle; 0 for none.
        columns: elements of a row.
        q_rows: rows of Q.
        k_rows: rows of K, and of V.
    """

    swizzle: int
    columns: int
    q_rows: int
    k_rows: int


@dataclass(frozen=True)
class Rung:
    """One kernel.

    Attributes:
        name: name of its file, without the ending.
        idea: what it adds to the previous rung, in a few words.
        threads: threads of a CTA.
        rows: query rows of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        maps: None if it has no tensor maps.
        bought: sentences on what the idea bought, for the ladder's page.
    """

    name: str
    idea: str
    threads: int
    rows: int = 64
    shared_bytes: int = 0
    maps: Maps | None = None
    bought: str = ""


@dataclass(frozen=True)
class Column:
    """Speeds that were not measured by `python -m bench.ladder` on this machine.

    Attributes:
        title: where they come from.
        tflops: by rung, implementation or peer.
    """

    title: str
    tflops: dict[str, float]


@dataclass(frozen=True)
class Ladder:
    """Kernels that each add one idea to the previous one.

    Attributes:
        name: name of its folder.
        title: what its last rung is, in a few words.
        about: sentences for its page.
        dtype: of the tensors, as in `Case`.
        head_dim: of q, k and v.
        masks: the values of `causal` that the rungs serve.
        multiple: lengths must be a multiple of it.
        target: of the PTX that the simulator runs, such as "compute_80".
        lowest, highest: compute capabilities that run the rungs; `highest` None for any newer one.
        ours: implementations of this project beside them, the first of them the shipped kernel.
        peers: candidates of PyTorch beside them.
        shapes: batch, heads and length of what is measured.
        simulated: heads and length of what the simulator counts.
        rungs: in order.
        columns: speeds from elsewhere.
    """

    name: str
    title: str
    about: str
    dtype: str
    head_dim: int
    masks: tuple[bool, ...]
    multiple: int
    target: str
    lowest: tuple[int, int]
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    simulated: tuple[int, int]
    rungs: tuple[Rung, ...]
    highest: tuple[int, int] | None = None
    columns: tuple[Column, ...] = field(default_factory=tuple)

    def source(self, rung: Rung) -> Path:
        """The CUDA source of a rung."""
        return FOLDER / self.name / f"{rung.name}.cu"

    def architecture(self, major: int, minor: int) -> str:
        """nvcc's name of a GPU of some compute capability."""
        exact = "a" if self.target.endswith("a") else ""
        return f"sm_{major}{minor}{exact}"

    def why_no_gpu(self, capability: tuple[int, int]) -> str | None:
        """Why a GPU cannot run the rungs; None if it can."""
        have, low = "{}.{}".format(*capability), "{}.{}".format(*self.lowest)
        if self.highest == self.lowest != capability:
            return f"the rungs of {self.name} need compute capability {low}; this GPU has {have}"
        if capability < self.lowest:
            return f"the rungs of {self.name} need {low} or newer; this GPU has {have}"
        return None

    def cases(self) -> list[Case]:
        """What is measured."""
        d = self.head_dim
        return [
            Case(
                f"{self.dtype} {b}x{h} {n} d{d}{' c' if causal else ''}",
                self.dtype, b, h, h, n, n, d, d, causal,
            )
            for b, h, n in self.shapes
            for causal in self.masks
        ]  # fmt: skip


BLACKWELL_CONSUMER = Ladder(
    name="blackwell_consumer",
    title="TMA and mma.sync in warps of two roles",
    about=(
        "The way from CUDA cores to the kernel for RTX 50: bf16, head dimension 64, no mask. "
        "A CTA owns 64 query rows and visits 64 keys at a time."
    ),
    dtype="bf16",
    head_dim=64,
    masks=(False,),
    multiple=64,
    target="compute_90",
    lowest=(9, 0),
    ours=("blackwell_consumer",),
    peers=("torch-flash", "torch-cudnn"),
    shapes=((2, 2, 512), (4, 8, 1024), (8, 16, 1024), (64, 64, 1024)),
    simulated=(2, 192),
    rungs=(
        Rung(
            "1_tiled", "tiles in shared memory, CUDA cores", 256,
            bought="The start: every score is computed by FMAs of one thread.",
        ),
        Rung(
            "2_vectorised", "16 bytes at a time, padded rows", 256,
            bought="Five times as fast: a quarter of the loads, and no bank conflicts.",
        ),
        Rung(
            "3_mma_sync", "mma.sync, all operands but K and V in registers", 128,
            bought="The largest step after that: tensor cores, and no score leaves the registers.",
        ),
        Rung(
            "4_tma", "TMA loads, rows without padding", 128, maps=Maps(0, 64, 64, 64),
            bought="A step back: TMA writes rows without padding, so ldmatrix has 8-way conflicts.",
        ),
        Rung(
            "5_swizzle", "128-byte swizzle", 128, maps=Maps(128, 64, 64, 64),
            bought="The conflicts are gone, and with them the cost of address arithmetic.",
        ),
        Rung(
            "6_double_buffer", "two buffers of K and V", 128, maps=Maps(128, 64, 64, 64),
            bought="The next block arrives while this one is multiplied.",
        ),
        Rung(
            "7_warp_specialised", "a producer warp, full and empty barriers", 160,
            maps=Maps(128, 64, 64, 64),
            bought="Consumer warps no longer wait for one another; worth little with three CTAs "
            "on an SM.",
        ),
    ),
    columns=(
        Column(
            "H200, 64x64 1024 (2026-11-21; rungs 4 to 7 without today's fence.proxy.async)",
            {
                "1_tiled": 6.1, "2_vectorised": 30.9, "3_mma_sync": 204.5, "4_tma": 58.5,
                "5_swizzle": 328.8, "6_double_buffer": 344.5, "7_warp_specialised": 344.8,
                "blackwell_consumer": 336.0, "torch-flash": 300.5, "torch-cudnn": 458.9,
            },
        ),
    ),
)  # fmt: skip

_WIDE, _TALL = 2 * 128 * (64 + 2 * 128), 2 * 128 * (128 + 2 * 64)  # bytes of Q, K and V

AMPERE = Ladder(
    name="ampere",
    title="cp.async, XOR swizzle, ldmatrix and mma.sync",
    about=(
        "The way to a kernel on cp.async and mma.sync, as every GPU from 8.0 on runs it: fp16, "
        "head dimension 128, no mask. Four warps own the query rows of a CTA; scores, P and "
        "outputs never leave their registers."
    ),
    dtype="fp16",
    head_dim=128,
    masks=(False,),
    multiple=128,
    target="compute_80",
    lowest=(8, 0),
    ours=("ampere",),
    peers=("torch-flash",),
    shapes=((16, 16, 8192), (16, 16, 2048)),
    simulated=(1, 384),
    rungs=(
        Rung(
            "01_base", "64 rows, 32 keys at a time, loads through registers, plain rows", 128,
            shared_bytes=2 * 128 * (64 + 2 * 32),
            bought="The start: tensor cores wait for shared memory, since the eight rows of a "
            "matrix lie in the same banks.",
        ),
        Rung(
            "02_swizzle", "XOR swizzle, 128 keys at a time", 128, shared_bytes=_WIDE,
            bought="By far the largest step: no bank conflicts, and a quarter as many rescalings "
            "of the outputs.",
        ),
        Rung(
            "03_cp_async", "cp.async: K and V arrive during the products", 128, shared_bytes=_WIDE,
            bought="Copies pass by the registers and overlap with products.",
        ),
        Rung(
            "04_v_pairs", "ldmatrix.x4.trans for two fragments of V", 128, shared_bytes=_WIDE,
            bought="Half as many instructions for V; as many bytes, so that little changes.",
        ),
        Rung(
            "05_exp2", "scale and log2(e) folded into one FMA before ex2", 128, shared_bytes=_WIDE,
            bought="One floating-point instruction fewer for each score.",
        ),
        Rung(
            "06_row_tiles", "two row tiles for each fragment of K and V: 128 rows, 64 keys", 128,
            rows=128, shared_bytes=_TALL,
            bought="Half as many loads from shared memory for a product.",
        ),
        Rung(
            "07_fragments_ahead", "the next fragments are loaded before the products", 128,
            rows=128, shared_bytes=_TALL,
            bought="Nothing: the compiler had ordered the loads so already, and the second set of "
            "fragments takes registers.",
        ),
    ),
    columns=(
        Column(
            "A100, published",
            {
                "01_base": 29.5, "02_swizzle": 165.0, "03_cp_async": 175.1, "04_v_pairs": 175.7,
                "05_exp2": 181.1, "06_row_tiles": 187.3, "07_fragments_ahead": 186.4,
                "FlashAttention-2": 203.7,
            },
        ),
    ),
)  # fmt: skip

SOFTMAX_IN_REGISTERS = Ladder(
    name="softmax_in_registers",
    title="where scores and P live",
    about=(
        "The way from CUDA cores to a softmax that never leaves the registers: fp16, head "
        "dimension 64, causal. Four warps own 64 query rows and visit 64 keys at a time."
    ),
    dtype="fp16",
    head_dim=64,
    masks=(True,),
    multiple=64,
    target="compute_80",
    lowest=(8, 0),
    ours=("ampere", "blackwell_consumer"),
    peers=("torch-flash",),
    shapes=((4, 12, 2048), (8, 12, 2048)),
    simulated=(1, 192),
    rungs=(
        Rung(
            "1_scalar", "fp32 on CUDA cores", 128, shared_bytes=4 * 64 * 64 * 4,
            bought="The start: one FMA at a time, and two loads from shared memory for each.",
        ),
        Rung(
            "2_wmma", "tensor cores by WMMA: fragments are loaded and stored whole", 128,
            shared_bytes=4 * 64 * 64 * 2 + 2 * 64 * 64 * 4,
            bought="Ten times as fast where it was published. WMMA hides which lane holds which "
            "element, so that scores, P and even the outputs pass through shared memory.",
        ),
        Rung(
            "3_vectorised", "copies of 16 bytes, padded rows", 128,
            shared_bytes=4 * 64 * 72 * 2 + 2 * 64 * 68 * 4,
            bought="An eighth of the instructions that copy, and no bank conflicts of fragments.",
        ),
        Rung(
            "4_ldmatrix", "mma.sync and ldmatrix; Q and outputs in registers", 128,
            shared_bytes=4 * 64 * 72 * 2 + 64 * 68 * 4 + 64 * 4,
            bought="One instruction loads four registers of a fragment, and outputs are "
            "rescaled where they are.",
        ),
        Rung(
            "5_registers", "scores and P in registers", 128, shared_bytes=3 * 64 * 72 * 2,
            bought="More than twice as fast where it was published: the sums of Q K^T, packed to "
            "16 bits, are the operand of P V as they lie, and no score passes through shared "
            "memory.",
        ),
        Rung(
            "6_direct_rescale", "P is made with the new maximum", 128, shared_bytes=3 * 64 * 72 * 2,
            bought="No second set of outputs, and one product for each output instead of two.",
        ),
    ),
    columns=(
        Column(
            "RTX 5080, published (it seems to count causal work in full)",
            {
                "1_scalar": 2.7, "2_wmma": 26.7, "3_vectorised": 38.3, "4_ldmatrix": 49.2,
                "5_registers": 125.2, "6_direct_rescale": 135.9,
            },
        ),
    ),
)  # fmt: skip

SIMT = Ladder(
    name="simt",
    title="fp32 on CUDA cores",
    about=(
        "The first steps of attention without tensor cores: fp32, head dimension 64, causal or "
        "not, any length. A thread owns one query row. The shipped kernel goes on from here: "
        "there a thread owns a patch of scores, so that each load serves several products."
    ),
    dtype="fp32",
    head_dim=64,
    masks=(False, True),
    multiple=1,
    target="compute_80",
    lowest=(7, 5),
    ours=("simt",),
    peers=("torch-efficient", "torch-math"),
    shapes=((1, 16, 2048), (4, 16, 512), (8, 16, 59)),
    simulated=(1, 100),
    rungs=(
        Rung(
            "1_naive", "the formula: two passes, everything from global memory", 64,
            bought="The start: the caches do all the sharing.",
        ),
        Rung(
            "2_tiled", "blocks of K and V in shared memory, Q in registers", 64,
            bought="64 rows share each element of K and V that is read from global memory, and no "
            "element of Q is read twice.",
        ),
        Rung(
            "3_online_softmax", "one pass: the row max rises, and outputs are rescaled", 64,
            bought="A third fewer products: scores are no longer computed twice. The price is a "
            "branch for each key.",
        ),
        Rung(
            "4_vectorised", "16 bytes at a time", 64,
            bought="A quarter of the loads, and sums that do not wait for one another.",
        ),
    ),
)  # fmt: skip

_ONE_GROUP = 2 * 128 * (64 + 4 * 64) + 128  # bytes of Q, two stages of K and V, and barriers
_TWO_GROUPS = 2 * 128 * (128 + 4 * 128) + 128

HOPPER = Ladder(
    name="hopper",
    title="wgmma beside the softmax",
    about=(
        "The way from a plain use of wgmma to products that run beside the softmax: fp16, head "
        "dimension 128, no mask. A warpgroup owns 64 query rows; scores, P and outputs stay in "
        "its registers."
    ),
    dtype="fp16",
    head_dim=128,
    masks=(False,),
    multiple=128,
    target="compute_90a",
    lowest=(9, 0),
    highest=(9, 0),
    ours=("hopper",),
    peers=("torch-flash", "torch-cudnn"),
    shapes=((16, 16, 8192), (16, 16, 2048)),
    simulated=(1, 384),
    rungs=(
        Rung(
            "1_wgmma", "wgmma without overlap; threads copy K and V", 128,
            shared_bytes=3 * 2 * 128 * 64,
            bought="The start: copies, two products and the softmax, one after the other.",
        ),
        Rung(
            "2_tma_ring", "a producer warp, TMA, two stages of K and V", 160,
            shared_bytes=_ONE_GROUP, maps=Maps(128, 64, 64, 64),
            bought="Copies run beside all else, and take neither instructions nor registers of "
            "the warps that multiply.",
        ),
        Rung(
            "3_two_warpgroups", "two warpgroups share blocks of 128 keys", 384, rows=128,
            shared_bytes=_TWO_GROUPS, maps=Maps(128, 64, 128, 128),
            bought="Half as many bytes of K and V for a product, and somebody to multiply while "
            "the other computes a softmax.",
        ),
        Rung(
            "4_ping_pong", "warpgroups take turns at the tensor cores", 384, rows=128,
            shared_bytes=_TWO_GROUPS, maps=Maps(128, 64, 128, 128),
            bought="The overlap of the two is no longer left to chance.",
        ),
        Rung(
            "5_overlap", "the softmax of a block beside P V of the one before", 384, rows=128,
            shared_bytes=_TWO_GROUPS, maps=Maps(128, 64, 128, 128),
            bought="A warpgroup overlaps with itself too, so that products never wait for the "
            "end of a softmax.",
        ),
    ),
)  # fmt: skip

LADDERS = (SIMT, AMPERE, SOFTMAX_IN_REGISTERS, HOPPER, BLACKWELL_CONSUMER)
BY_NAME = {ladder.name: ladder for ladder in LADDERS}
