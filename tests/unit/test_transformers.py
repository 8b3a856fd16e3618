"""archflash.integrations.transformers: tiny models with random weights give what they give with
transformers' own `eager` attention.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import archflash

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from archflash.integrations import _packed_text, _transformers_mask  # noqa: E402
from archflash.integrations import transformers as integration  # noqa: E402
from archflash.integrations._mask_functions import Rule  # noqa: E402
from archflash.integrations._model_mask import Mask, Seen  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def decoder(config: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        made = getattr(transformers, config)(**SIZES, **more)
        return transformers.AutoModelForCausalLM.from_config(made)

    return make


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": decoder("LlamaConfig"),
    "qwen3": decoder("Qwen3Config"),
    "mistral-window": decoder("MistralConfig", sliding_window=5),
    "gemma2-softcap-window": decoder("Gemma2Config", sliding_window=5, attn_logit_softcapping=2.0),
    "gemma3-window": decoder(
        "Gemma3TextConfig", sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt-oss-sinks": decoder(
        "GptOssConfig", sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": decoder("Phi3Config"),
}  # fmt: skip

# Their masks are more than a rule and padding.
LLAMA4 = decoder(
    "Llama4TextConfig", attention_chunk_size=5, num_local_experts=2, num_experts_per_tok=1,
    layer_types=["chunked_attention", "full_attention"], intermediate_size_mlp=48, moe_layers=[],
)  # fmt: skip


def modernbert() -> Any:
    return transformers.ModernBertModel(transformers.ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=0,
        num_attention_heads=4, local_attention=6, global_attn_every_n_layers=2,
    ))  # fmt: skip


def gemma3_with_images() -> Any:
    text = SIZES | {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    del text["pad_token_id"]
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96,
        boi_token_index=97, eoi_token_index=98,
    ))  # fmt: skip


IMAGES = torch.zeros(3, 13, dtype=torch.long)
IMAGES[:, 2:6] = 1
IMAGES[0, 8:12] = IMAGES[1, 7:11] = 1
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama4-chunks": (LLAMA4, {}),
    "gemma3-both-ways": (
        decoder(
            "Gemma3TextConfig", sliding_window=5, use_bidirectional_attention=True,
            layer_types=["sliding_attention", "full_attention"],
        ), {},
    ),
    "gemma3-images": (gemma3_with_images, {"token_type_ids": IMAGES}),
    "modernbert-window": (modernbert, {}),
}  # fmt: skip


def with_both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The same model with archflash and with transformers' own attention."""
    torch.manual_seed(0)
    ours = make().eval()
    for name, parameter in ours.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()
    theirs = make().eval()
    theirs.load_state_dict(ours.state_dict())
    ours.set_attn_implementation(integration.NAME)
    theirs.set_attn_implementation("eager")
    assert ours.config._attn_implementation == integration.NAME  # models may share a configuration
    return ours, theirs


def tokens(batch: int = 3, rows: int = 13) -> Tensor:
    return torch.randint(1, 99, (batch, rows), generator=torch.Generator().manual_seed(3))


def padding(side: str, lengths: tuple[int, ...] = (13, 6, 9), rows: int = 13) -> Tensor:
    row = torch.arange(rows)
    within = torch.stack([row < n if side == "right" else row >= rows - n for n in lengths])
    return within.long()


@pytest.fixture(params=["masks", "packed"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On the CPU no kernel serves a call, and so nothing is packed; unless it is asked for."""
    packed = bool(request.param == "packed")
    monkeypatch.setattr(_packed_text, "_a_kernel_may_serve", lambda _: packed)
    return packed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of `archflash.attention`. No mask may be given its values."""
    made: list[dict[str, Any]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        made.append({name: value for name, value in options.items() if value is not None})
        return archflash.attention(q, k, v, **options)

    def values(mask: integration.Mask) -> Tensor:
        raise AssertionError("a layer needs no values of its mask")

    for module in (integration, _packed_text):
        monkeypatch.setattr(module, "attention", attention)
    monkeypatch.setattr(integration.Mask, "values_", values)
    return made


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, side: str, packs: bool, calls: list[dict[str, Any]]) -> None:
    ours, theirs = with_both(DECODERS[name])
    mask = None if side == "none" else padding("left" if side == "holes" else side)
    if side == "holes" and mask is not None:
        mask[:, 9] = 0
    with torch.no_grad():
        found = ours(tokens(), attention_mask=mask).logits
        expected = theirs(tokens(), attention_mask=mask).logits
    real = torch.ones(3, 13) if mask is None else mask
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], atol=2e-5, rtol=1e-4)
    assert len(calls) == 2
    for options in calls:
        in_one = side != "none" and packs and not (side == "holes" and "window" in options)
        assert ("cu_seqlens_q" in options) == in_one
        assert options["causal"] is True


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_left_padding(name: str, cache: str) -> None:
    ours, theirs = with_both(DECODERS[name])
    call = {
        "attention_mask": padding("left"), "max_new_tokens": 8, "do_sample": False,
        "cache_implementation": cache, "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    found, expected = (model.generate(tokens(), **call) for model in (ours, theirs))
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_gradients(name: str) -> None:
    grads = []
    for model in with_both(DECODERS[name]):
        mask = padding("right")
        labels = tokens().masked_fill(mask == 0, -100)
        model(tokens(), attention_mask=mask, labels=labels).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name_, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name_], atol=2e-5, rtol=1e-3)


def first_output(model: Any, ids: Tensor, **call: Any) -> Tensor:
    found: Tensor = model(ids, **call)[0]
    return found


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_ranges(
    name: str, side: str, packs: bool, calls: list[dict[str, Any]]
) -> None:
    make, more = OTHERS[name]
    ours, theirs = with_both(make)
    mask = None if side == "none" else padding("left" if side == "holes" else side)
    if side == "holes" and mask is not None:
        mask[:, 9] = 0
    call = {"attention_mask": mask} | more
    ids = tokens().clamp(max=95)
    with torch.no_grad():
        found, expected = (first_output(model, ids, **call) for model in (ours, theirs))
    real = (torch.ones(3, 13) if mask is None else mask).bool()
    torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=1e-4)
    assert len(calls) >= 2
    assert not any("attn_mask" in options for options in calls)


def test_known_masks_are_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a mask of queries times keys")

    monkeypatch.setattr(_transformers_mask, "sdpa_mask", computed)
    positions = torch.cat([torch.arange(n) for n in (4, 7, 2)])[None]
    with torch.no_grad():
        for name, call in (
            ("llama4-chunks", {"attention_mask": padding("left")}),
            ("llama4-chunks", {"position_ids": positions, "use_cache": False}),
            ("gemma3-images", {"token_type_ids": IMAGES, "attention_mask": padding("right")}),
            ("modernbert-window", {}),
        ):
            ids = tokens(1 if "position_ids" in call else 3).clamp(max=95)
            model = OTHERS[name][0]()
            model.set_attn_implementation(integration.NAME)
            assert first_output(model.eval(), ids, **call).isfinite().all()


class _Largest(TorchDispatchMode):
    """The most numbers that a tensor has which is made inside."""

    found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.found = max(self.found, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "documents", "images", "unknown"])
def test_no_mask_of_many_rows_exists_as_a_whole(name: str) -> None:
    rows = 5000
    utils = transformers.masking_utils
    numbers = (torch.arange(rows) // 700)[None]
    causal = utils.causal_mask_function
    function = {
        "causal": causal,
        "window": utils.sliding_window_causal_mask_function(100),
        "chunks": utils.chunked_causal_mask_function(300, torch.zeros(1, dtype=torch.long)),
        "documents": utils.and_masks(causal, utils.packed_sequence_mask_function(numbers)),
        "images": lambda b, h, q, k: (k <= q) | (numbers[b, q] == numbers[b, k]),
        "unknown": lambda b, h, q, k: (k % 64 < 9) & (k <= q) & (k > q - 200),
    }[name]
    given = torch.ones(1, rows, dtype=torch.bool)
    given[:, :9] = False
    with _Largest() as largest:
        mask = integration.make_mask(1, rows, rows, mask_function=function, attention_mask=given)
    assert isinstance(mask, integration.Mask)
    assert largest.found < rows * rows
    if name in ("images", "unknown"):  # their rows were computed, some at a time
        assert largest.found > 1 << 20


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_in_chunks(cache: str) -> None:
    make = transformers.masking_utils.create_chunked_causal_mask
    if cache == "static" and "block_sequence_ids" not in inspect.signature(make).parameters:
        pytest.skip("this version of transformers passes it an argument that it lacks")
    call = {
        "attention_mask": padding("left"), "max_new_tokens": 8, "do_sample": False,
        "cache_implementation": cache,
    }  # fmt: skip
    found, expected = (model.generate(tokens(), **call) for model in with_both(LLAMA4))
    assert torch.equal(found, expected)


def test_a_mask_function_of_the_users_own(calls: list[dict[str, Any]]) -> None:
    """In few ranges it is no tensor of queries times keys; in more it is one."""
    near = transformers.masking_utils.sliding_window_overlay(3)
    make: dict[str, Any] = {
        "batch_size": 2, "q_length": 13, "kv_length": 13, "use_vmap": True,
        "attention_mask": padding("left", (13, 6)).bool(),
    }  # fmt: skip
    for own, in_ranges in (
        (lambda b, h, q, k: (k // 4 == 1) & (q >= 0), True),
        (lambda b, h, q, k: (k % 2 == 0) & (q >= 0), False),
    ):
        function = transformers.masking_utils.or_masks(near, own)
        found = integration.make_mask(**make, mask_function=function)
        expected = transformers.masking_utils.sdpa_mask(
            **make, mask_function=function, allow_is_causal_skip=False
        )
        assert isinstance(found, integration.Mask) == in_ranges
        q = torch.randn(2, 2, 13, 8)
        layer = torch.nn.Identity()
        one, other = (integration.forward(layer, q, q, q, x)[0] for x in (found, expected))
        torch.testing.assert_close(one, other)
        assert ("key_ranges" in calls[-2]) == in_ranges
        assert "attn_mask" in calls[-1]


# --- packed text ---

LENGTHS = (4, 7, 2)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BEGINS = torch.tensor([0, 4, 11, 13])


@pytest.mark.parametrize(
    "call",
    [
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS + 5},
        {"position_ids": POSITIONS, "use_cache": False},
        {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 13, dtype=torch.long)},
        {"position_ids": POSITIONS, "cu_seq_lens_q": BEGINS, "cu_seq_lens_k": BEGINS},
        {
            "position_ids": POSITIONS, "cu_seq_lens_q": BEGINS, "cu_seq_lens_k": BEGINS,
            "max_length_q": 7, "max_length_k": 7, "use_cache": False,
        },
    ],
    ids=["positions", "positions-from-5", "no-cache", "ones", "lengths", "lengths-no-cache"],
)  # fmt: skip
@pytest.mark.parametrize("name", DECODERS)
def test_documents_in_one_row(name: str, call: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    ours, theirs = with_both(DECODERS[name])
    with torch.no_grad():
        found = ours(tokens(1), **call).logits
        positions = call["position_ids"].split(LENGTHS, 1)
        alone = [
            theirs(ids, position_ids=own).logits
            for ids, own in zip(tokens(1).split(LENGTHS, 1), positions, strict=True)
        ]
    torch.testing.assert_close(found, torch.cat(alone, 1), atol=2e-5, rtol=1e-4)
    assert all("cu_seqlens_q" in options for options in calls)


@pytest.mark.parametrize("use_cache", [False, True])
def test_documents_in_rows_of_a_batch_and_their_gradients(use_cache: bool) -> None:
    lengths = [(5, 8), (9, 4)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    gradients = []
    for packed, model in zip((True, False), with_both(DECODERS["mistral-window"]), strict=True):
        if packed:
            found = model(tokens(2), position_ids=positions, use_cache=use_cache).logits
        else:
            found = torch.stack([
                torch.cat([model(ids[None]).logits[0] for ids in row.split(split)])
                for row, split in zip(tokens(2), lengths, strict=True)
            ])  # fmt: skip
        found.square().mean().backward()
        gradients.append([found, *(p.grad for p in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_documents_in_a_static_cache() -> None:
    ours, theirs = with_both(DECODERS["llama"])
    with torch.no_grad():
        caches = [
            transformers.StaticCache(config=x.config, max_cache_len=20) for x in (ours, theirs)
        ]
        name = (
            "cache" if "cache" in inspect.signature(ours.forward).parameters else "past_key_values"
        )
        found = ours(tokens(1), position_ids=POSITIONS, **{name: caches[0]}).logits
        alone = [theirs(ids).logits for ids in tokens(1).split(LENGTHS, 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), atol=2e-5, rtol=1e-4)


def attend(q: Tensor, mask: Tensor | None = None, **call: Any) -> Tensor:
    layer = torch.nn.Identity()
    layer.is_causal = True  # type: ignore[assignment]
    return integration.forward(layer, q, q, q, mask, **call)[0]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_position_ids_that_are_changed_in_place_are_looked_at_again(mode: Any) -> None:
    with mode():
        q = torch.randn(1, 2, 13, 8)
        positions = torch.arange(13)[None].clone()
        assert torch.equal(attend(q, position_ids=positions), attend(q))
        positions.copy_(POSITIONS)
        alone = torch.cat([attend(part) for part in q.split(LENGTHS, 2)], 1)
        torch.testing.assert_close(attend(q, position_ids=positions), alone)


@pytest.mark.parametrize(
    "read", [lambda x: x[0, 0, 0, 0], lambda x: x[..., :4], lambda x: x.numpy()]
)
def test_documents_stay_apart_where_a_layer_has_read_the_mask(read: Any) -> None:
    mask = Mask.make(1, 13, 13, Seen(Rule(True, 5), 0), "cpu")
    q = torch.randn(1, 2, 13, 8)
    before = attend(q, mask, position_ids=POSITIONS)
    read(mask)
    after = attend(q, mask, position_ids=POSITIONS)
    torch.testing.assert_close(after, before)
    assert not torch.allclose(after, attend(q, mask))


def test_lengths_that_cannot_be_meant() -> None:
    q = torch.randn(1, 2, 13, 8)
    longer, dense = torch.randn(1, 2, 20, 8), torch.ones(1, 1, 13, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match="13 queries and 20 keys"):
        integration.forward(
            torch.nn.Identity(), q, longer, longer, dense, cu_seq_lens_q=BEGINS,
            cu_seq_lens_k=BEGINS,
        )  # fmt: skip
    with pytest.raises(ValueError, match="cu_seq_lens_k is missing"):
        attend(q, cu_seq_lens_q=BEGINS)
    layer = torch.nn.Identity()
    bias = torch.zeros(1, 1, 1, 13)
    with pytest.raises(ValueError, match="1 queries and 13 keys"):
        integration.forward(
            layer, q[:, :, :1], q, q, None, position_bias=bias, cu_seq_lens_q=BEGINS,
            cu_seq_lens_k=BEGINS,
        )  # fmt: skip


def eager(scores: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Attention (batch, queries, heads, d) as transformers' eager functions compute it."""
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("kind", ["indices", "block_indices", "sinks", "indices and sinks"])
@pytest.mark.parametrize("masked", ["rule", "padding", "documents"])
def test_keys_that_an_indexer_chose_and_sinks_of_queries(
    kind: str, masked: str, packs: bool
) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 13, 8), torch.randn(2, 2, 2, 13, 8)
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    visible = causal.expand(2, 1, 13, 13)
    mask, given = None, {}
    if masked == "padding":
        kept = padding("right", (13, 9)).bool()
        mask = integration.make_mask(2, 13, 13, attention_mask=kept)
        visible = visible & kept[:, None, None]
    elif masked == "documents":
        given["position_ids"] = POSITIONS
        visible = visible & (POSITIONS.eq(0).cumsum(1)[:, None] == POSITIONS.eq(0).cumsum(1).mT)
    layer = torch.nn.Identity()
    layer.is_causal = True  # type: ignore[assignment]
    sinks = None
    if "sinks" in kind:
        given["sinks"] = sinks = torch.randn(2, 4, 13, 1)
    if "indices" in kind:
        blocks, size = "block" in kind, 4
        layer.indexer = types.SimpleNamespace(block_size=size)  # type: ignore[assignment]
        shape = (2, 2, 13, 4 if blocks else 13)
        places = torch.rand(shape).argsort(-1)[..., : 2 if blocks else 6].int()
        chosen = torch.zeros(shape, dtype=torch.bool).scatter(-1, places.long(), True)
        if blocks:
            places = torch.cat([places, torch.full_like(places[..., :1], -1)], -1)
            chosen = chosen.repeat_interleave(size, -1)[..., :13].repeat_interleave(2, 1)
            given["block_indices"] = places
        else:
            chosen, given["indices"] = chosen[:, :1], places[:, 0]
        visible = visible & chosen
    found = integration.forward(layer, q, k, v, mask, scaling=0.3, **given)[0]
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = eager(q @ keys.mT * 0.3, values, visible, sinks)
    some = visible.any(-1).expand(2, 4, 13).transpose(1, 2)
    torch.testing.assert_close(found[some], expected[some])


def test_layers_give_no_option_that_is_unknown() -> None:
    """An option that a new model gives its layers must not be lost among those that say what the
    mask says already.
    """
    known = set(inspect.signature(integration.forward).parameters) | {
        "deterministic", "output_attentions", "sliding_window",
    }  # fmt: skip
    folder = Path(transformers.__file__).parent / "models"
    call = re.compile(r"attention_interface\(\n(.*?)^ *\)", re.DOTALL | re.MULTILINE)
    option = re.compile(r"^ *(\w+)=", re.MULTILINE)
    calls = 0
    for file in folder.glob("*/modeling_*.py"):
        for arguments in call.findall(file.read_text()):
            calls += 1
            assert set(option.findall(arguments)) <= known, file.name
    assert calls > 100


def test_a_cache_of_continuous_batching_takes_keys_up_and_its_mask_says_all() -> None:
    torch.manual_seed(0)
    q, past = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 7, 8)
    given: dict[str, Any] = {}

    class Cache:
        def update(self, **told: Any) -> tuple[torch.Tensor, torch.Tensor]:
            given.update(told)
            return tuple(torch.cat([past, told[x]], 2) for x in ("key_states", "value_states"))  # type: ignore[return-value]

    layer = torch.nn.Identity()
    layer.layer_idx = 3  # type: ignore[assignment]
    mask = torch.rand(1, 1, 13, 20) < 0.7
    out, _ = integration.forward(
        layer, q, q, q, mask, cache=Cache(), cu_seq_lens_q=BEGINS, cu_seq_lens_k=BEGINS,
        block_table="its own",
    )  # fmt: skip
    keys = torch.cat([past, q], 2)
    expected = archflash.attention(q, keys, keys, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert given["layer_idx"] == 3
    assert set(given["kwargs"]) == {"block_table", "cu_seq_lens_q", "cu_seq_lens_k"}


def test_dropout_of_documents_is_archflashs() -> None:
    q = torch.randn(1, 2, 13, 8)
    torch.manual_seed(5)
    found = attend(q, cu_seq_lens_q=BEGINS, cu_seq_lens_k=BEGINS, dropout=0.5)
    torch.manual_seed(5)
    flat, ends = q[0].transpose(0, 1), BEGINS.int()
    expected = archflash.attention(
        flat, flat, flat, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, dropout_p=0.5
    )
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("kind", ["padding", "chunks", "values"])
def test_lengths_beside_a_mask_that_hides_more(kind: str) -> None:
    batch, begins = 2, torch.tensor([0, 4, 13, 20, 26])
    make: dict[str, Any] = {"batch_size": batch, "q_length": 13, "kv_length": 13}
    if kind == "padding":
        make["attention_mask"] = padding("right", (13, 9)).bool()
    elif kind == "chunks":
        make["mask_function"] = transformers.masking_utils.chunked_causal_mask_function(
            3, torch.zeros(batch, dtype=torch.long)
        )
    mask = integration.make_mask(**make, allow_is_causal_skip=False)
    assert isinstance(mask, integration.Mask)
    document = torch.searchsorted(begins[1:], torch.arange(26), right=True).view(batch, 13)
    same = (document[:, :, None] == document[:, None])[:, None]
    q = torch.randn(batch, 2, 13, 8)
    expected = attend(q, mask.values_() & same)
    given = mask.values_().clone() if kind == "values" else mask
    found = attend(q, given, cu_seq_lens_q=begins, cu_seq_lens_k=begins)
    torch.testing.assert_close(found, expected)


def test_compiled_and_traced_calls_isolate_documents_too() -> None:
    def call(q: Tensor, positions: Tensor) -> Tensor:
        return attend(q, position_ids=positions)

    q = torch.randn(1, 2, 13, 8)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    traced = torch.jit.trace(call, (q, torch.arange(13)[None]), check_trace=False)
    for positions in (torch.arange(13)[None], POSITIONS):
        for other in (compiled, traced):
            torch.testing.assert_close(other(q, positions), call(q, positions))


def test_compiled_layers_take_the_mask_of_a_model() -> None:
    def call(q: Tensor, mask: Tensor) -> Tensor:
        return attend(q, mask)

    q = torch.randn(2, 2, 13, 8)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (5, 9, 2):
        given = padding("right", (13, length)).bool()
        mask = integration.make_mask(2, 13, 13, attention_mask=given)
        assert isinstance(mask, integration.Mask)
        given.fill_(False)  # a mask does not change with what it was made of
        torch.testing.assert_close(compiled(q, mask), attend(q, mask.values_()))
        mask[:, :, 4, 0] = False
        torch.testing.assert_close(compiled(q, mask), attend(q, mask.values_()))
        torch.testing.assert_close(attend(q, mask), attend(q, mask.values_()))


# --- mixed precision ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_autocast(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []

    def attention(*tensors: Tensor, **options: Any) -> Any:
        outputs.append(archflash.attention(*tensors, **options))
        return outputs[-1]

    for module in (integration, _packed_text):
        monkeypatch.setattr(module, "attention", attention)
    results = []
    for model in with_both(DECODERS[name]):
        with torch.autocast("cpu", dtype):
            found = model(tokens(), attention_mask=padding("right"), labels=tokens())
        found.loss.backward()
        grads = [p.grad for n, p in model.named_parameters() if "self_attn" in n]
        assert all(x is not None and x.isfinite().all() for x in grads)
        results.append(found.logits.float()[padding("right").bool()])
    torch.testing.assert_close(*results, atol=0.1, rtol=0.1)
    assert [x.dtype for x in outputs] == [dtype] * 2


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("side", ["none", "right"])
def test_bert(side: str) -> None:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    ours, theirs = with_both(lambda: transformers.BertModel(copy.deepcopy(config)))
    mask = None if side == "none" else padding(side)
    with torch.no_grad():
        found = ours(tokens(), attention_mask=mask).last_hidden_state
        expected = theirs(tokens(), attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_dropout_runs_in_pytorch_and_is_counted() -> None:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0,
    )  # fmt: skip
    ours, _ = with_both(lambda: transformers.BertModel(copy.deepcopy(config)))
    call = {"attention_mask": padding("right")}
    archflash.stats(reset=True)
    runs = [ours.train(training)(tokens(), **call)[0] for training in (True, True, False, False)]
    assert not torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])
    ((reason, count),) = archflash.stats(reset=True).declined.items()
    assert reason.startswith("dropout: ")
    assert count == 2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("side", ["none", "right", "holes", "many holes"])
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "documents"])
def test_dropout_that_drops_nothing(name: str, side: str, biased: bool) -> None:
    """The mask that PyTorch gets says the same as what archflash gets, but for the dropout."""
    utils = transformers.masking_utils
    function = {
        "causal": utils.causal_mask_function,
        "window": utils.sliding_window_causal_mask_function(4),
        "chunks": utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)),
        "documents": utils.causal_mask_function,
    }[name]
    given = None if side == "none" else padding("right", (13, 12)).bool()
    if given is not None and side != "right":
        given[:, 1 : 4 if side == "holes" else 12 : 2] = False
    mask = integration.make_mask(2, 13, 13, mask_function=function, attention_mask=given)
    torch.manual_seed(2)
    q, bias = torch.randn(2, 2, 13, 8), torch.randn(1, 2, 13, 13) if biased else None
    call = {"position_ids": POSITIONS} if name == "documents" else {}
    expected = attend(q, mask, position_bias=bias, **call)
    found = attend(q, mask, position_bias=bias, dropout=1e-9, **call)
    torch.testing.assert_close(found, expected)


def test_a_batch_of_learned_queries() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(3, 2, 13, 8)
    layer = torch.nn.Identity()
    found = integration.forward(layer, q, k, k, None, is_causal=False)[0]
    expected = F.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert", "mistral-window", "packed"])
def test_dropout_asks_for_no_mask(
    name: str, padded: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a kernel of archflash drops the weights of what is no plain call."""
    asked: list[tuple[Any, ...]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *options: Any, **more: Any) -> Tensor:
        asked.append(options)
        return archflash.scaled_dot_product_attention(q, k, v, *options, **more)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(integration, "who_drops", lambda *_: "hopper")
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=48, attention_probs_dropout_prob=0.5,
        )  # fmt: skip
        ours, _ = with_both(lambda: transformers.BertModel(copy.deepcopy(config)))
    else:
        ours, _ = with_both(DECODERS["llama" if name == "packed" else name])
    for module in ours.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    call: dict[str, Any] = {"attention_mask": padding("right") if padded else None}
    if name == "packed" and not padded:
        call["position_ids"] = POSITIONS
    found = first_output(ours.train(), tokens(1 if "position_ids" in call else 3), **call)
    found.sum().backward()
    if padded or name in ("mistral-window", "packed"):
        assert not asked
        assert all(options["dropout_p"] > 0 and "attn_mask" not in options for options in calls)
    else:
        assert not calls
        assert all(options[0] is None and options[2] == (name == "llama") for options in asked)
        assert asked


@pytest.mark.parametrize("name", ["gemma2-softcap-window", "gpt-oss-sinks"])
def test_dropout_with_softcap_or_sinks_runs_in_archflash(name: str) -> None:
    """PyTorch's own function has neither."""
    ours, _ = with_both(DECODERS[name])
    for module in ours.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    archflash.stats(reset=True)
    with torch.no_grad():
        exact = ours(tokens(), attention_mask=padding("left")).logits
        runs = [ours.train()(tokens(), attention_mask=padding("left")).logits for _ in range(2)]
    assert not torch.equal(runs[0], runs[1])
    assert all(bool(x.isfinite().all()) for x in (exact, *runs))
    assert archflash.stats().declined == {}
    loss = ours.train()(tokens()).logits.square().mean()
    loss.backward()
    gradients = [x.grad for x in ours.parameters() if x.grad is not None]
    assert gradients
    assert all(bool(x.isfinite().all()) for x in gradients)


@pytest.mark.usefixtures("packs")
def test_t5_has_a_bias_of_positions() -> None:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    ours, theirs = with_both(lambda: transformers.T5ForConditionalGeneration(copy.deepcopy(config)))
    call = {"attention_mask": padding("right"), "labels": tokens(3, 7)}
    found, expected = (model(tokens(), **call) for model in (ours, theirs))
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=1e-4)
    found.loss.backward()
    expected.loss.backward()
    biases = [
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(*biases, atol=2e-5, rtol=1e-3)
    sequences = [model.generate(tokens(), max_new_tokens=6) for model in (ours, theirs)]
    assert torch.equal(*sequences)


def test_vit() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4,
    )  # fmt: skip
    ours, theirs = with_both(lambda: transformers.ViTModel(copy.deepcopy(config)))
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = (model(image).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_mask_has_its_values_where_a_model_computes_with_it() -> None:
    call = {"batch_size": 2, "q_length": 5, "kv_length": 7, "q_offset": 4, "kv_offset": 2}
    window = transformers.masking_utils.sliding_window_causal_mask_function(3)
    given = torch.ones(2, 9, dtype=torch.bool)
    given[0, :5] = False
    for rule, options in (
        (transformers.masking_utils.causal_mask_function, {}),
        (transformers.masking_utils.bidirectional_mask_function, {}),
        (window, {"local_size": 3}),
    ):
        for attention_mask in (None, given):
            asked = call | {"mask_function": rule, "attention_mask": attention_mask} | options
            found = integration.make_mask(**asked)
            expected = transformers.masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
            assert isinstance(found, integration.Mask)
            assert type(found[:, :, 1:]) is Tensor
            assert torch.equal(found[:, :, 1:], expected[:, :, 1:])
            assert torch.equal(torch.where(found, 1, 0), expected.long())


NO_SDPA: dict[str, dict[str, Any]] = {
    "DeepseekV4": {
        "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "q_lora_rank": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 8, "num_hidden_layers":
        2, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 99, "sliding_window":
        8, "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    },
    "BigBirdPegasus": {
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 99,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    },
    "PegasusX": {
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "vocab_size": 99, "decoder_ffn_dim": 64, "encoder_ffn_dim":
        64, "max_position_embeddings": 64, "block_size": 8, "num_global_tokens": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SDPA)
def test_models_that_do_not_support_sdpa(name: str) -> None:
    """The first joins what its compressed keys hide to the mask, as added numbers; in the others no
    mask does not mean a causal one.
    """
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this version of transformers has no such model")
    config = getattr(transformers, f"{name}Config")(**NO_SDPA[name])
    torch.manual_seed(0)
    kind = "ForConditionalGeneration" if name == "PegasusX" else "ForCausalLM"
    model = getattr(transformers, f"{name}{kind}")._from_config(config, attn_implementation="eager")
    model.eval()
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    call = {"decoder_input_ids": ids} if name == "PegasusX" else {}
    with torch.no_grad():
        expected = model(ids, **call).logits
        model.set_attn_implementation(integration.NAME)
        torch.testing.assert_close(model(ids, **call).logits, expected)


def test_models_are_asked_for_their_support_once_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask that was made for a config alone says nothing about the models of it."""
    config = type("OddConfig", (), {"__module__": "odd.configuration_odd"})
    assert _transformers_mask._support_of(config) == (True, True)
    model = type("OddModel", (transformers.PreTrainedModel,), {"__module__": "odd.modeling_odd"})
    module = types.ModuleType("odd.modeling_odd")
    vars(module)["OddModel"] = model
    monkeypatch.setitem(sys.modules, "odd.modeling_odd", module)
    assert _transformers_mask._support_of(config) == (False, False)


@pytest.mark.slow
def test_a_model_is_compiled_as_a_whole_in_its_training() -> None:
    """torch.compile must not trace how the models of a config are looked up: for GPT-2, whose loss
    breaks the graph, it did not come to an end.
    """
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel._from_config(
        config, attn_implementation=integration.NAME
    ).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for rows in (12, 17):
        ids = torch.randint(3, 99, (2, rows), generator=torch.Generator().manual_seed(rows))
        losses = [call(input_ids=ids, labels=ids).loss for call in (compiled, model)]
        torch.testing.assert_close(*losses)
        losses[0].backward()
