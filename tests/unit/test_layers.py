"""The layers of python/archflash: a module imports only what stands below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import archflash

ROOT = Path(archflash.__file__).parent

# The lowest first. Modules of one row do not import one another; those of sim/ and cli/ stand in
# rows of their own. The text in archflash/__init__.py says the same for readers.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_archflash", "_archflash_sim", "_errors", "_packed", "_posix", "_pytorch_faults"),
    ("_user_tables",),
    (
        "_call_times",
        "_eager",
        "_flops",
        "_fused_kernels",
        "_given",
        "_schemas",
        "_sequences",
        "_strides",
    ),
    ("_mask_arguments",),
    ("_block_masks", "_query_ranges"),
    ("_bias", "masks", "_dropout", "_packed_rows", "_sharding", "_plain_tensors", "_torch_kernels"),
    (
        "_autocast",
        "_key_lists",
        "_latent_rows",
        "_options",
        "_registry",
        "_measured",
        "_torch_masks",
        "reference.blocks",
    ),
    ("_value_checks", "reference.formula"),
    ("_calibrated", "_proofs", "_torch_plain", "reference.cache", "reference.rule"),
    ("_torch", "reference.four_bits", "reference.int8_pv"),
    ("reference.approximate",),
    ("reference",),
    ("_dispatch.forcing", "_dispatch.device", "_dispatch.pytorch", "_torch_cache", "_mended_calls"),
    ("_dispatch.approximating",),
    ("_dispatch.order",),
    ("_dispatch.explain",),
    ("_dispatch.choosing",),
    ("_dispatch",),
    ("_gradients",),
    ("_compute_gradients",),
    ("_eager_gradients", "_ops"),
    ("_ops_backward",),
    ("_autograd",),
    (
        "_api",
        "_backward",
        "_backward_operators",
        "_kvcache",
        "_merge",
        "_quantize",
        "_quantize_mxfp8",
        "_quantize_nvfp4",
    ),
    ("_nvfp4_attention", "_shared_prefix", "_warm_up", "_forward_operators", "_stats"),
    ("_replacing",),
    ("_overrides",),
    ("_sdpa",),
    ("distributed._neighbours", "distributed._pieces"),
    ("distributed._agree", "distributed._dealing"),
    ("distributed._moving",),
    ("distributed._shards",),
    ("distributed._exchange",),
    ("distributed._mask",),
    ("distributed._calls",),
    ("distributed._plan",),
    ("distributed._beside", "distributed._layout"),
    ("distributed._heads", "distributed._partial", "distributed._turns"),
    ("distributed._travel",),
    ("distributed._stages", "distributed._cost"),
    ("distributed._reading", "distributed._work"),
    ("distributed._passes",),
    ("distributed._attention",),
    ("distributed",),
    ("compat.transformer_engine", "compat.xformers.ops.fmha.attn_bias"),
    ("compat._arguments",),
    ("compat._flash", "compat.flash_attn.bert_padding", "compat.flash_attn.layers.rotary"),
    ("compat._packed_rows", "compat._passes", "compat.flash_attn.ops.triton.rotary"),
    ("compat._flash_3", "compat.flash_mla", "compat.sageattention.core"),
    ("compat._flash_3_operators",),
    ("compat.flash_attn_interface",),
    ("compat.flash_attn.cute", "compat.flash_attn_3", "compat.sageattention"),
    ("compat.sageattn3", "compat.xformers.ops.fmha", "compat.xformers.version"),
    ("compat.xformers.ops",),
    ("compat.xformers",),
    ("compat.flash_attn._private",),
    ("compat.flash_attn.flash_attn_interface", "compat._operators"),
    ("compat.flash_attn_2_cuda",),
    ("compat.flash_attn.ops.triton",),
    ("compat.flash_attn", "compat.flash_attn.layers", "compat.flash_attn.ops"),
    ("compat",),
    ("integrations._chosen_keys", "integrations._mask_functions"),
    ("integrations._model_mask", "integrations._paged"),
    ("integrations._transformers_mask", "integrations._packed_text"),
    ("integrations._sglang_batch", "integrations._sglang_refusals"),
    ("integrations.sglang_backend", "integrations.vllm_backend"),
    (
        "integrations.comfyui",
        "integrations.diffusers",
        "integrations.sglang",
        "integrations.transformers",
        "integrations.vllm",
        "integrations.vllm_mla",
        "integrations.vllm_mla_sparse",
    ),
    ("integrations.transformers_parallel",),
    ("integrations",),
    ("sim._report",),
    ("sim._launch", "sim._trace"),
    ("sim._attention", "sim._picture"),
    ("sim",),
    ("__init__",),
    ("verify._machine", "verify._setup", "verify._wrong"),
    ("verify._making", "verify._probes"),
    ("verify._checks",),
    ("verify._calls", "verify._kernels", "verify._times"),
    ("verify._jobs",),
    ("verify._worker",),
    ("verify._run",),
    ("verify._verdict",),
    ("verify",),
    ("cli",),
    ("cli.gpus",),
    ("cli.explain", "cli.info", "cli.of_clone", "cli.replay", "cli.verify"),
    ("_calibrate", "_calibrate.grid"),
    ("_calibrate.calls", "_calibrate.fit"),
    ("_calibrate.lab",),
    ("_calibrate.worker",),
    ("_calibrate.measuring",),
    ("cli.calibrate", "cli.sim"),
    ("cli.bench",),
    ("__main__",),
)
# The package registers the simulator with the runtime, and imports it at the first call that needs
# it: the one import that goes upward.
HOOKS = {("__init__", "sim._attention")}
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def files() -> dict[str, Path]:
    return {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}


def resolved(target: str, name: str | None) -> str:
    """The module of the package that `from TARGET import NAME` or `import TARGET` needs."""
    base = target.removeprefix("archflash").removeprefix(".")
    whole = base if name is None else f"{base}.{name}".removeprefix(".")
    return whole if whole in LAYER_OF else base or "__init__"


def imports_of(source: str) -> Iterator[str]:
    """The modules of the package that a text imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "archflash":
                    yield resolved(alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            if node.module is not None and node.module.split(".")[0] == "archflash":
                for alias in node.names:
                    yield resolved(node.module, alias.name)


def upward(name: str, source: str) -> list[str]:
    return [
        target
        for target in imports_of(source)
        if LAYER_OF[target] >= LAYER_OF[name] and (name, target) not in HOOKS
    ]


def test_every_module_has_a_layer() -> None:
    compiled = {"_archflash", "_archflash_sim"}
    assert set(files()) | compiled == set(LAYER_OF)
    assert len(LAYER_OF) == sum(map(len, LAYERS))


def test_nothing_imports_upward() -> None:
    wrong = {name: upward(name, file.read_text()) for name, file in files().items()}
    assert not {name: targets for name, targets in wrong.items() if targets}


def test_an_import_upward_would_be_found() -> None:
    lazy = "def f():\n    from archflash._api import attention\n"
    assert upward("_ops", lazy) == ["_api"]
    assert upward("_dispatch", "def f():\n    from archflash.sim import _attention\n") == [
        "sim._attention"
    ]
    assert upward("_dispatch", "import archflash\n") == ["__init__"]
    assert upward("_api", "from archflash import _api, _ops, version\n") == ["_api", "__init__"]
    assert upward("sim._launch", "from archflash import _archflash_sim\n") == []
