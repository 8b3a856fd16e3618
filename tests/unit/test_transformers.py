"""archflash.integrations.transformers: tiny models with random weights give what they give with
transformers' own `eager` attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from archflash.integrations import transformers as integration  # noqa: E402

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
    monkeypatch.setattr(integration, "_a_kernel_may_serve", lambda _: packed)
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

    monkeypatch.setattr(integration, "attention", attention)
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


def test_sequences_packed_into_one_row() -> None:
    ours, theirs = with_both(DECODERS["llama"])
    positions = torch.cat([torch.arange(n) for n in (4, 7, 2)])[None]
    with torch.no_grad():
        found = ours(tokens(1), position_ids=positions, use_cache=False).logits
        expected = theirs(tokens(1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


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
