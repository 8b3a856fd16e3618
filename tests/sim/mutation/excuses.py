"""Mutants that compute what the kernel computes, with the reason why.

An excuse counts only for a mutant that survives all calls. Mutants are known by what they change
and by the text of the CUDA line that the instruction came from, not by line numbers, which move.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Excuse:
    """Why mutants are equivalent to the kernel.

    Attributes:
        kind: of the mutant.
        change: a regular expression for the whole of its change.
        source: a part of "file: text of the line".
        reason: why it computes the same for every input.
        kernel: a part of the kernel's name.
        caller: a part of the text of a line that the source's function is called in.
    """

    kind: str
    change: str
    source: str
    reason: str
    kernel: str = ""
    caller: str = ""


_NO_SIGN = (
    "division of a number from 0 to 2^29 by a power of two: the correction for negative ones is 0 "
    "whatever it is shifted by"
)
_SIGN = r"shr\.s32: 31 -> 3[02]|shr\.u32: (2[5-9]|30) -> .*"
_OWN_COPY = (
    "clears columns that the same thread's own copy fills afterwards, or the next tile's that are "
    "cleared or copied by the same thread afterwards: taking columns away from what is cleared "
    "is found as a read of uninitialised memory"
)
_WHOLE = (
    "only decides whether a step without an edge is masked as if it had one, which hides nothing"
)

EXCUSES = (
    *(
        Excuse("constant", _SIGN, source, _NO_SIGN)
        for source in (
            "const int step = (count + 31) / 32;",
            "const int tiles = (work.nq + BLOCK_Q - 1) / BLOCK_Q;",
            "return GROUP == 8 ? row % 8 : row / 2 % 4;",
            "(chunk % GROUP ^ swizzle(row)) * 16;",
            "const int row = index / (C::HEAD_DIM_V / 8);",
        )
    ),
    *(
        Excuse(kind, change, source, _OWN_COPY)
        for kind, change in (
            ("constant", r"(max|add|mov|and)\..*|shr\.u32: 4 -> .*"),
            ("predicate", r"negate the guard of bra|setp\.lt\.s32 -> .*"),
        )
        for source in (
            "tile.cuh: if (lane.column + group * Lane::GROUP_COLUMNS >= columns) {",
            "tile.cuh: for (int group = 0; group < Lane::GROUPS; ++group) {",
            "tile.cuh: group * Tile::GROUP * 16) = make_uint4(0, 0, 0, 0);",
        )
    ),
    Excuse("constant", r"shl\.b32: 3 -> 4", "tile.cuh: column = chunk * 8;", _OWN_COPY),
    Excuse(
        "predicate",
        "negate the guard of bra",
        "attention_fwd.cuh: if (key + C::BLOCK_K <= nk)",
        "blocks before the last have no ragged end: the copy that looks for one copies the same",
    ),
    Excuse(
        "predicate",
        r"setp\.lt\.f32 -> setp\.geu\.f32",
        "max + logf(sum)};",
        "logf multiplies denormal numbers by 2^23 and takes 23 off again: exact for others too",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 1 -> 3",
        "sm_30_intrinsics.hpp",
        "a maximum over lanes xor 3, then xor 2, meets the same four lanes as xor 1, then xor 2",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 16 -> 48",
        "sm_30_intrinsics.hpp",
        "shfl.bfly takes the lower five bits of the lane, and xor 16 is its own partner",
    ),
    Excuse(
        "constant",
        r"bfi\.b32: 29 -> 3[01]",
        "attention_fwd.cuh",
        "the field begins at bit 3: 29 bits are all that is left of 32",
    ),
    Excuse(
        "constant",
        r"bfi\.b32: 28 -> (29|3\d)",
        "attention_fwd.cuh",
        "the field begins at bit 4: 28 bits are all that is left of 32",
    ),
    Excuse(
        "constant",
        r"add\.s32: 31 -> 32",
        "const int step = (count + 31) / 32;",
        "a search in steps that are longer than need be finds the same sequence",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 0 -> .*",
        "attention_work.cuh: if (batch < 0) return work;",
        "a CTA without rows returns before it reads what else its work says",
    ),
    Excuse(
        "constant",
        r"max\.s32: 0 -> -1",
        "return row + first_shift > 0 ? row + first_shift : 0;",
        "no key has the number -1",
    ),
    Excuse(
        "constant",
        r"max\.s32: 0 -> [12]|add\.s32: -1 -> (0|-[23])|ld\.shared\.u32: .*",
        "visible_keys.cuh: return row +",
        _WHOLE,
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "__syncwarp();  // all lanes of the warp have read what the barrier guards",
        "elect.sync behind it waits for all lanes too; that it orders their accesses of memory as "
        "well is promised for bar.warp.sync only",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "__syncwarp();  // every lane has read what the rows held",
        "counts where the last block of keys reads Q from shared memory with no barrier behind it; "
        "elsewhere a barrier of the CTA, or release(), has ordered the lanes before",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "__syncwarp();  // the next tile is searched by the whole warp;",
        "where no sequence is searched nothing needs the whole warp before the next elect.sync, "
        "which waits for it, and the search's own shuffles wait too",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "ring.parity());  // of a skipped block",
        "rows of a tile that differ by no more keys than the ring holds: before its first block a "
        "warp skips too few to get round the ring",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "",
        "what the arrival hands back was read by ldmatrix, which a warp executes as one",
        kernel="protocol_pipeline",
    ),
    Excuse(
        "protocol",
        "bit 16 of the descriptor of A",
        "",
        "K-major with a swizzle as wide as the tile: there is no leading offset to be read",
        kernel="protocol_wgmma",
    ),
    Excuse(
        "sync",
        "delete bar.sync",
        "",
        "the barrier of the cluster follows at once",
        kernel="protocol_multicast",
    ),
    Excuse(
        "sync",
        r"delete barrier\.cluster\.wait(\.acquire)?\.aligned",
        "",
        "the one at the end: all that others write to a CTA's shared memory is there when its own "
        "mbarrier says so, before it comes to this barrier",
        kernel="protocol_",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "__syncwarp();  // nobody reads the value before any more",
        "with 16-bit inputs the flag was read before the last release(), which lets no lane behind",
    ),
    *(
        Excuse(
            "sync",
            "delete bar.warp.sync",
            f"blackwell_dc/{page}: __syncwarp();",
            "what the lanes have done since the last one are instructions of the whole warp on "
            "tensor memory, and elect.sync waits for the warp; that it orders more is promised for "
            "bar.warp.sync only",
            kernel="blackwell_dc",
            caller=caller,
        )
        for page in ("pipeline.cuh", "pair_pipeline.cuh")
        for caller in ("(of_mma.p_ready(", "(of_mma.p_last(")
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "softmax.cuh: ptx::mbarrier_wait_parity(barriers.stats_empty(t)",
        "with two tiles: S of a block is made behind the product that waited for correction, which "
        "had read the message before; with one tile, and for the last message, it counts",
        kernel="blackwell_dc",
    ),
    *(
        Excuse(
            "sync",
            r"delete mbarrier\.try_wait\..*",
            source,
            "with two tiles: softmax tells of a block when it has seen its S, whose commit covers "
            "O of the block before; with one tile it counts (of the two unrolled waits the "
            "compiler gives one the line of the wait for the message, which counts)",
            kernel="blackwell_dc",
        )
        for source in (
            "output.cuh: ptx::mbarrier_wait_parity(barriers.o_ready(t), (product + block - 1) & 1)",
            "output.cuh: ptx::mbarrier_wait_parity(barriers.stats_full(t), message & 1);",
        )
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "load.cuh: ptx::mbarrier_wait_parity(barriers.q_empty(t), q_parity);",
        "mma gives both tiles' Q back behind the last S of both: each of the two waits says what "
        "the other does, and so does that for K's slot in a ring of three",
        kernel="blackwell_dc",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "load.cuh: ptx::mbarrier_wait_parity(barriers.kv_empty(slot.index), slot.parity);  // V's",
        "the first V of a row tile: that Q is free says that all products are made but the last "
        "O's, whose V is in another slot",
        kernel="blackwell_dc",
    ),
    Excuse(
        "constant",
        r"shfl\.sync\.idx\.b32: .*",
        "walk.cuh: return __shfl_sync(FULL_WARP, x, 0);",
        "x is the same in all lanes, whichever of them it is taken from",
        kernel="blackwell_dc",
    ),
    Excuse(
        "predicate",
        "swap the values of selp",
        "tile_walk.cuh: return round * workers() + (round % 2 == 0 ?",
        "the tiles of a round are shared out in the other order: each still has one CTA",
        kernel="blackwell_dc",
    ),
)
