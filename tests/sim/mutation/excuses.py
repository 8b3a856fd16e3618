"""Mutants that compute what the kernel computes, with the reason why.

An excuse counts only for a mutant that survives all calls. It names the mutants by what they change
and by a tag that stands in the CUDA source above the statement that the instruction comes from
(`// mutants: tag`, see tests/sim/tags.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Excuse:
    """Why mutants are equivalent to the kernel.

    Attributes:
        kind: of the mutant.
        change: a regular expression for the whole of its change.
        tag: of the statement in the CUDA source; empty for small kernels and those of
            tests/sim/protocols, which are known by their names.
        reason: why it computes the same for every input.
        kernel: a part of the kernel's name.
        unless: the name of a call; an instruction that it executes is not excused.
    """

    kind: str
    change: str
    tag: str
    reason: str
    kernel: str = ""
    unless: str = ""


EXCUSES = (
    Excuse(
        "constant",
        r"shr\.s32: 31 -> 3[02]|shr\.u32: (2[5-9]|30) -> .*",
        "never-negative",
        "division of a number from 0 to 2^29 by a power of two: the correction for negative ones "
        "is 0 whatever it is shifted by",
    ),
    Excuse(
        "constant",
        r"shr\.u32: 31 -> 30",
        "never-negative",
        "division of a number from 0 to 2^29 by a constant: the correction for negative ones is "
        "made of the two highest bits of the quotient, which are 0",
    ),
    *(
        Excuse(
            kind,
            change,
            tag,
            "clears columns that the same thread's own copy fills afterwards, or the next tile's "
            "that are cleared or copied by the same thread afterwards: taking columns away from "
            "what is cleared is found as a read of uninitialised memory",
        )
        for kind, change, tag in (
            (
                "constant",
                r"(max|add|mov|and)\..*|shr\.u32: 4 -> .*|shl\.b32: 3 -> 4",
                "own-copy-follows",
            ),
            ("predicate", r"negate the guard of bra|setp\.lt\.s32 -> .*", "own-copy-follows"),
            # The comparison that ends the loop over rows has the line of the assignment in it.
            ("predicate", r"setp\.lt\.s32 -> .*", "loop-before-own-copy"),
        )
    ),
    Excuse(
        "predicate",
        "negate the guard of bra",
        "ragged-copy-of-whole-block",
        "blocks before the last have no ragged end: the copy that looks for one copies the same",
    ),
    Excuse(
        "predicate",
        r"setp\.lt\.f32 -> setp\.geu\.f32",
        "denormals-in-logf",
        "logf multiplies denormal numbers by 2^23 and takes 23 off again: exact for others too",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 1 -> 3",
        "maximum-of-four-lanes",
        "a maximum over lanes xor 3, then xor 2, meets the same four lanes as xor 1, then xor 2",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 16 -> 48",
        "butterfly-of-whole-warp",
        "shfl.bfly takes the lower five bits of the lane, and xor 16 is its own partner",
    ),
    Excuse(
        "constant",
        r"bfi\.b32: 29 -> 3[01]",
        "field-to-last-bit",
        "the field begins at bit 3: 29 bits are all that is left of 32",
    ),
    Excuse(
        "constant",
        r"bfi\.b32: 28 -> (29|3\d)",
        "field-to-last-bit",
        "the field begins at bit 4: 28 bits are all that is left of 32",
    ),
    Excuse(
        "constant",
        r"add\.s32: 31 -> 32",
        "longer-steps",
        "a search in steps that are longer than need be finds the same sequence",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 0 -> .*",
        "returns-at-once",
        "a CTA without rows returns before it reads what else its work says",
    ),
    Excuse("constant", r"max\.s32: 0 -> -1", "no-negative-key", "no key has the number -1"),
    Excuse(
        "constant",
        r"max\.s32: 0 -> [12]|add\.s32: -1 -> (0|-[23])|ld\.shared\.u32: .*",
        "masked-needlessly",
        "only decides whether a step without an edge is masked as if it had one, which hides "
        "nothing",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "elect-waits-for-warp",
        "elect.sync behind it waits for all lanes too; that it orders their accesses of memory as "
        "well is promised for bar.warp.sync only",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "rows-were-read",
        "counts where the last block of keys reads Q from shared memory with no barrier behind it; "
        "elsewhere a barrier of the CTA, or release(), has ordered the lanes before",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "search-waits-for-warp",
        "where no sequence is searched nothing needs the whole warp before the next elect.sync, "
        "which waits for it, and the search's own shuffles wait too",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "few-skipped-blocks",
        "rows of a tile that differ by no more keys than the ring holds: before its first block a "
        "warp skips too few to get round the ring",
    ),
    Excuse(
        "sync",
        r"delete wgmma\.fence\.sync\.aligned",
        "fence-before-both-products",
        "the fence before the product with K has ordered these registers too, but for a tile's "
        "last product; ptxas waits for every product unless each group has a fence of its own",
    ),
    Excuse(
        "sync",
        r"delete (mbarrier\.(try_wait|arrive)\..*|fence\.proxy\.async\..*)",
        "needless-with-one-tile",
        "a CTA of this kernel has one tile: its first loads find all stages free, and no load "
        "comes behind its last product and its output; where a CTA has several tiles it counts",
        kernel="hopper_attention_fwd_bf16_d64_few",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "last-tile-came-by-the-rings",
        "the keys of a CTA's last tile came to stages that were handed back behind the tile "
        "before, whose message is overwritten; with fewer blocks than stages it counts",
        kernel="hopper_attention_fwd_bf16_d96_large",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "last-tile-came-by-the-rings",
        "what says that no tile follows overwrites the message of the tile two before, which that "
        "tile has read before it hands back the stage for which the last tile waits",
        kernel="hopper_attention_fwd_bf16_d64_short",
    ),
    Excuse(
        "sync",
        r"delete fence\.proxy\.async\..*",
        "ragged-rows-come-last",
        "in the packed call of these mutants a CTA with such rows has no later tile",
        kernel="hopper_attention_fwd_",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "flag-was-read",
        "with 16-bit inputs the flag was read before the last release(), which lets no lane behind",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "v-came-back-before-q",
        "a warp hands Q's part back behind its last V, and q_empty was awaited before; kernels "
        "without this wait were measured to be slower",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "flag-is-read-later",
        "the flag was read before the vote on the maxima, and is read again behind release(), "
        "which lets no lane behind",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "whole-warp-on-tensor-memory",
        "what the lanes have done since the last one are instructions of the whole warp on "
        "tensor memory, and elect.sync waits for the warp; that it orders more is promised for "
        "bar.warp.sync only",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "message-was-read",
        "with two tiles: S of a block is made behind the product that waited for correction, which "
        "had read the message before; with one tile, and for the last message, it counts",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "product-was-made",
        "with two tiles: softmax tells of a block when it has seen its S, whose commit covers "
        "O of the block before; with one tile it counts (of the two unrolled waits the "
        "compiler gives one the line of the wait for the message, which counts)",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "q-free-for-both-tiles",
        "mma gives both tiles' Q back behind the last S of both: each of the two waits says what "
        "the other does, and so does that for K's slot in a ring of three",
    ),
    Excuse(
        "sync",
        r"delete mbarrier\.try_wait\..*",
        "v-free-with-q",
        "the first V of a row tile: that Q is free says that all products are made but the last "
        "O's, whose V is in another slot",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "q-empty-waits-too",
        "where O lies over Q: the arrival at q_empty just behind waits for the lanes, and whatever "
        "overwrites the rows comes behind that; elsewhere it counts",
    ),
    Excuse(
        "sync",
        "delete bar.warp.sync",
        "arrives-for-itself",
        "the lanes have read and written nothing since they last synchronised, or at all: only the "
        "elected lane's own wait or arrival comes before this arrival",
    ),
    Excuse(
        "constant",
        r"shfl\.sync\.idx\.b32: .*|mov\.u32: (31|0) -> .*",
        "same-in-all-lanes",
        "x is the same in all lanes, whichever of them it is taken from",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 31 -> (1[6-9]|2\d|3\d|6\d)",
        "from-a-low-lane",
        "the lanes whose value is taken are below 16, inside any of these bounds",
    ),
    Excuse(
        "predicate",
        "swap the values of selp",
        "tiles-in-other-order",
        "the tiles of a round are shared out in the other order: each still has one CTA",
        kernel="blackwell_dc",
    ),
    Excuse(
        "sync",
        r"delete fence\.proxy\.async\..*",
        "needless-with-one-tile",
        "outputs of 8-bit products do not pass through shared memory: what TMA writes next no "
        "thread has read or written",
        kernel="hopper_attention_fwd_e4m3",
    ),
    *(
        Excuse(
            kind,
            ".*",
            "zeros-without-keys",
            "the compiler makes a copy of the end of a tile for warps without keys, in which sums "
            "and outputs of all lanes are 0, whichever is taken; in the other copy, which alone "
            "serves a call all of whose rows see keys, it counts",
            unless="small scores",
        )
        for kind in ("constant", "predicate")
    ),
    # The kernels below have no tags: few instructions of a kind, each of which was looked at.
    Excuse(
        "sync",
        "delete griddepcontrol.launch_dependents",
        "",
        "the next kernel starts later, when this one has ended",
    ),
    Excuse(
        "sync",
        r"mbarrier\.try_wait\.parity\.acquire\.cluster.* -> .*",
        "",
        "bytes that an mbarrier counts need no scope, those of st.async as those of TMA",
        kernel="protocol_store-async",
    ),
    *(
        Excuse(
            "sync",
            "delete griddepcontrol.wait",
            "",
            "of warps and CTAs that have no work: others wait, so that this launch ends after the "
            "one before all the same",
            kernel=f"{folder}_attention_bwd_",
        )
        for folder in ("ampere", "hopper")
    ),
    *(
        Excuse(
            "sync",
            "delete griddepcontrol.wait",
            "",
            "a producer's warp waits both before the order of a tile is read and before a tile is "
            "taken: what comes second says nothing, and tiles without rows, which have a copy of "
            "their own, are in packed calls, with no kernel before them",
            kernel=kernel,
        )
        for kernel in ("_masked", "_dense", "_table")
    ),
    Excuse(
        "sync",
        r"ld\.acquire\.gpu\.global\.s32 -> ld\.relaxed\..*",
        "",
        "additions follow, of values that depend on what was read, as behind the relaxed read "
        "before it: the lint of that says so",
        kernel="ampere_attention_bwd_",
    ),
    *(
        Excuse(
            "constant",
            r"shr\.s32: 31 -> 3[02]|shr\.u32: (2[5-9]|30) -> .*",
            "",
            "division of a number from 0 to 2^29 by a power of two: the correction for negative "
            "ones is 0 whatever it is shifted by",
            kernel=kernel,
        )
        for kernel in ("hopper_order_tiles_", "hopper_transpose_v")
    ),
    Excuse(
        "constant",
        r"bfi\.b32: 26 -> 2\d",
        "",
        "the number of a row, of which the bits from 2^29 on are 0",
        kernel="hopper_summarize_ranges_",
    ),
    Excuse(
        "predicate",
        r"setp\.le\.s32 -> setp\.gt\.s32",
        "",
        "TileOrder turns no tiles of a walk whose CTAs take them by a counter: turned_end is 0, "
        "and the comparison with turned_begin beside it says nothing",
        kernel="hopper_order_tiles_",
    ),
    Excuse(
        "constant",
        r"mov\.u32: (16 -> 48|8 -> 24|4 -> 12|2 -> 6|1 -> 3)",
        "",
        "steps of a butterfly: shfl.bfly takes the lower five bits, and xor 8, then xor 12, meets "
        "the same lanes as xor 8, then xor 4",
        kernel="hopper_combine_",
    ),
    Excuse(
        "constant",
        r"mov\.u32: 31 -> 30",
        "",
        "one of four unrolled shuffles comes to lane 31: the others take lanes up to 30",
        kernel="hopper_combine_",
    ),
    Excuse(
        "constant",
        r"and\.b64: -4294967296 -> .*",
        "",
        "asks whether numbers of 64 bits have only 32, so that a shorter division, which gives the "
        "same, will do",
        kernel="hopper_combine_",
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
)
