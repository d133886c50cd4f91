"""docs/reference.md: tables of the ops, the passes and the architectures, generated from the code."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from markdown_table import table

from ingot.backends.inductor.emit_cuda import InductorCuda
from ingot.compile.competing import competing
from ingot.compile.op_claims import one_call_of_each
from ingot.ir.artifact.plan import FEW_TOKENS, BucketClass
from ingot.ir.backend import Backend, No
from ingot.ir.errors import ConfigError
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.tables import ROPE_TYPES
from ingot.models.architectures import ARCHITECTURES
from ingot.models.blocks.altup import AltUpSpec
from ingot.models.blocks.attention import AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.laurel import LaurelSpec
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.normed_latent_attention import NormedLatentAttentionSpec
from ingot.models.blocks.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from ingot.models.blocks.shared_attention import SharedAttentionSpec
from ingot.models.blocks.shortcut import ShortcutStartSpec
from ingot.models.blocks.stream_decoder import StreamDecoderSpec
from ingot.models.blocks.stream_layer import StreamLayerSpec
from ingot.models.config import ConfigReader
from ingot.passes.base import Pass
from ingot.passes.pipeline import ON_REQUEST, OPTIONAL, PIPELINE, SHARDING

HEAD = """\
# Reference

`make docs` writes this page from the code, and a test compares both: change the code, not this file.
"""
OPS_INTRO = """\
## Ops

*Legal* lists the stages of an op: any, before the cache is inserted (pure), after it (cached), or only while placements
on a mesh are open. A *fused* op decomposes into others, and is legal from FUSED on. *Regions* may contain fusible ops.
Backends claim a call with f32 tensors on a CPU and with bf16 on a GPU (sm_90), with at most {few} tokens (few) or more
(many). {whole} claim every op but collectives; on a GPU, not attention and cache writes either.
"""
PASSES_INTRO = """\
## Passes

In the order in which they run. From LOWERED on they run once per bucket class. `--passes "default,-name"` removes
*optional* ones. Passes *on request* run if they are named, after the other passes of their stage.
"""
ARCHITECTURES_INTRO = """\
## Architectures

For a config.json with sizes only: the fields of a model's specs that differ from Llama, and the layers with a window or
without rotation. Fields of the config can change most of it, biases too.
"""
_EVERY_OP = ("reference", "rowwise")
_BUCKETS = {
    "few tokens": BucketClass(name="few", tokens=(1, FEW_TOKENS)),
    "many": BucketClass(name="many", tokens=(FEW_TOKENS + 1, 2048)),
}


def reference() -> str:
    """Return the text of docs/reference.md."""
    return "\n".join([HEAD, *_ops(), "", *_passes(), "", *_architectures(), ""])


def _intro(text: str) -> Iterator[str]:
    yield from text.split("\n")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _first_sentence(text: str | None) -> str:
    """Return the first sentence of the first paragraph."""
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")


def _ops() -> Iterator[str]:
    columns = {
        "on a CPU": _backends(Target.detect("cpu"), torch.float32),
        "on a GPU": _backends(Target.named("sm_90"), torch.bfloat16),
    }
    yield from _intro(OPS_INTRO.format(few=FEW_TOKENS, whole=" and ".join(f"`{name}`" for name in _EVERY_OP)))
    rows = []
    for op in OPS.values():
        kind = op.legal + (", fused" if op.decompose else "")
        meaning = _first_sentence(op.reference.__doc__)
        backends = [", ".join(by_op[f"ingot.{op.name}"]) or "–" for by_op in columns.values()]
        rows.append((f"`{op.schema}`", meaning, kind, ", ".join(op.states), "yes" if op.fusible else "no", *backends))
    yield from table(("op", "is", "legal", "writes state", "regions", *columns), rows)


def _backends(target: Target, dtype: torch.dtype) -> dict[str, list[str]]:
    """Return by op the backends of a target that claim a call of it, with the steps if not all."""
    _, calls = one_call_of_each(OPS, dtype)
    found: dict[str, list[str]] = {op: [] for op in calls}
    for backend in map(_anywhere, competing("auto", target, {"tp": 2})):
        name = backend.name
        claims = {
            op: [size for size, bucket in _BUCKETS.items() if not isinstance(backend.claim([call], target, bucket), No)]
            for op, call in calls.items()
        }
        if name in _EVERY_OP:
            refused = {op for op, sizes in claims.items() if len(sizes) < len(_BUCKETS)}
            gpu = target.device == "cuda"
            needing = {f"ingot.{op.name}" for op in OPS.values() if op.across or (op.needs_kernel and gpu)}
            assert refused == needing, f"{name} refuses {refused ^ needing}"
            continue
        for op, sizes in claims.items():
            if sizes:
                found[op].append(name if len(sizes) == len(_BUCKETS) else f"{name} ({sizes[0]})")
    return found


def _anywhere(backend: Backend) -> Backend:
    """Return the backend with the claims of a machine that has all its tools."""
    return InductorCuda(missing=lambda target: "") if isinstance(backend, InductorCuda) else backend


def _passes() -> Iterator[str]:
    yield from _intro(PASSES_INTRO)
    phases = {"always": PIPELINE, "on a mesh": (SHARDING,)}
    rows = [
        (phase.stage, "optional" if one.name in OPTIONAL else runs, one)
        for runs, listed in phases.items()
        for phase in listed
        for one in phase.passes
    ]
    rows += [(made.joins, "on request", made()) for made in ON_REQUEST.values()]
    rows.sort(key=lambda row: row[0])  # stable: keeps the order within a stage
    yield from table(
        ("leads to", "pass", "runs", "numerics", "options", "is"),
        (
            (stage.name, f"`{one.name}`", runs, one.numerics.name, _options(one), _subject(one))
            for stage, runs, one in rows
        ),
    )


def _options(one: Pass) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in one.options().items()) or "–"


def _subject(one: Pass) -> str:
    """Return the first line of the pass's module, without the name."""
    line = _first_line(sys.modules[type(one).__module__].__doc__)
    return line.removeprefix(f"{one.name}: ")


_LAYERS = 12  # divisible by the periods of windows and rotations: 2, 3, 4 and 6
_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "num_kv_shared_layers": 4,  # Gemma 3n's default is for more layers
    # DeciLM and Solar have sizes of their own.
    "num_key_value_heads_per_layer": [2, 1] * (_LAYERS // 2),
    "bskcn_1": [2, 6],
    "bskcn_2": [4],
    "bskcn_3": [4, 8],
    "bskcn_4": [6],
}
# The numbers of experts, under all their names.
_EXPERTS: Mapping[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "moe_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
}
# Further or other fields that families need, by their names.
_OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "deepseek_v3": {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "topk_group": 1},
    "deepseek_v32": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "topk_group": 1,
        "mlp_layer_types": ["sparse"] * _LAYERS,
    },
    "mistral4": {"num_key_value_heads": 4, "head_dim": 80, "qk_rope_head_dim": 16, "qk_nope_head_dim": 64},
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "topk_group": 1,
        "mlp_layer_types": ["sparse"] * _LAYERS,
    },
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "mlp_layer_types": ["sparse"] * _LAYERS,
    },
    "llama_mla": {"num_key_value_heads": 4, "qk_rope_head_dim": 16},
    "qwen3_mla": {"kv_lora_rank": 32, "qk_rope_head_dim": 16},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "num_layers": _LAYERS // 2,
        "zero_expert_num": 4,
    },
    "baichuan": {"num_key_value_heads": 4, "z_loss_weight": 0},
    "minicpm": {"num_experts": 0},
    "dbrx": {
        "num_key_value_heads": 1,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": _LAYERS,
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2},
    },
    "step3": {"num_key_value_heads": 1, "moe_top_k": 2, "moe_layers_enum": [*range(_LAYERS)]},
    "telechat2": {"n_layer": _LAYERS, "n_head": 4, "base_seqlen": 8192},
}
# Constants of all types of rotary tables; each type reads its own.
_ROPE: Mapping[str, Any] = {
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _architectures() -> Iterator[str]:
    yield from _intro(ARCHITECTURES_INTRO)
    rows, usual = [], _traits(ARCHITECTURES["LlamaForCausalLM"].read(ConfigReader(_SIZES)))
    for name, architecture in ARCHITECTURES.items():
        sizes = {**_SIZES, **_EXPERTS, **_OWN_SIZES.get(architecture.family, {})}
        spec = architecture.read(ConfigReader(sizes))
        ropes = [kind for kind in ROPE_TYPES if spec.ropes and _reads(architecture.read, sizes, kind)]
        rows.append(
            (
                f"`{name}`",
                architecture.family,
                ", ".join(_differences(_traits(spec), usual)) or "–",
                _layers(spec),
                "all" if len(ropes) == len(ROPE_TYPES) else ", ".join(ropes) or "–",
            )
        )
    yield from table(("architecture", "family", "other than Llama", "layers", "rope types"), rows)
    yield from ["", f"Rope types: {', '.join(ROPE_TYPES)}."]


def _reads(read: Any, sizes: Mapping[str, Any], kind: str) -> bool:
    try:
        read(ConfigReader({**sizes, "rope_scaling": {**_ROPE, "rope_type": kind}}))
    except ConfigError:
        return False
    return True


# Sizes, the contents of the column of layers, and parts with fields of their own here.
_NO_TRAITS = (
    "heads",
    "kv_heads",
    "head_dim",
    "width",
    "eps",
    "branches",
    "window",
    "chunk",
    "q_scale",
    "rotary",
    "table",
    "stored",
    "stored_positions",
    "positions",
)


_NO_TRAITS_OF_EXPERTS = ("limit", "alpha", "least_sum", "by_logits", "one_row", "stored", "place")


# Specs of a single family; their fields are sizes, norms and parts.
_BY_NAME = (StreamLayerSpec, AltUpSpec, LaurelSpec, PerLayerInputSpec, PerLayerEmbeddingSpec, ShortcutStartSpec)


def _traits(spec: DecoderSpec | StreamDecoderSpec) -> dict[str, Any]:
    """Return the traits of a decoder's first layer by "KIND.FIELD", without sizes."""
    layer, norm, *others = spec.layers[0], spec.norm, spec.embedding, spec.head
    others += [norm] if norm is not None else []
    if isinstance(spec, StreamDecoderSpec):
        others.append(spec.inputs)
    blocks, traits = _blocks(layer), dict[str, Any]()
    for branch in layer.branches if isinstance(layer, LayerSpec) else ():
        traits |= {f"{branch.name}_norm": branch.norm is not None, f"{branch.name}_post_norm": bool(branch.post_norm)}
        traits[f"{branch.name}_stream_norm"] = bool(branch.stream_norm)
    latent = [block for block in blocks if isinstance(block, LatentAttentionSpec | NormedLatentAttentionSpec)]
    rotaries = {one.rotary for one in (*_attentions(spec), *latent) if one.rotary is not None}
    for one in (layer, *blocks, *rotaries, *others):
        traits[type(one).__name__] = True
        if isinstance(one, _BY_NAME):
            continue
        if isinstance(one, ExpertsSpec):
            traits |= _of_experts(one)
            continue
        if isinstance(one, NormedLatentAttentionSpec):
            continue
        if isinstance(one, LatentAttentionSpec):
            traits |= {"latent.kv_norm": False} if one.kv_norm is None else {}
            traits |= {"latent.q_rank": one.q_rank is not None}
            traits |= {"latent.q_scale": True} if one.q_scale is not None else {}
            traits |= {"latent.indexer": True} if one.indexer is not None else {}
            continue
        kind = type(one).__name__.removesuffix("Spec").lower()
        names = [field.name for field in fields(one) if field.name not in _NO_TRAITS]
        traits |= {f"{kind}.{name}": getattr(one, name) for name in names}
    return {**traits, "skips": isinstance(spec, DecoderSpec) and bool(spec.skips)}


def _of_experts(spec: ExpertsSpec) -> dict[str, Any]:
    """Return traits of experts, their router and their shared part: fields that are not the default, without names."""
    traits = dict[str, Any]()
    for one in (spec, spec.router, *([spec.shared] if spec.shared is not None else [])):
        kind = type(one).__name__.removesuffix("Spec").lower()
        for field in fields(one):
            value = getattr(one, field.name)
            if field.default is not MISSING and value != field.default and field.name not in _NO_TRAITS_OF_EXPERTS:
                traits[f"{kind}.{field.name}"] = value if field.name in ("scores", "activation") else True
    return traits


def _blocks(layer: LayerSpec | StreamLayerSpec) -> list[Any]:
    if isinstance(layer, LayerSpec):
        return [branch.block for branch in layer.branches]
    return [layer.attention, layer.mlp, layer.altup, layer.laurel, layer.input]


def _attentions(spec: DecoderSpec | StreamDecoderSpec) -> list[AttentionSpec]:
    blocks = [block for layer in spec.layers for block in _blocks(layer)]
    blocks = [block.attention if isinstance(block, SharedAttentionSpec) else block for block in blocks]
    return [block for block in blocks if isinstance(block, AttentionSpec)]


def _differences(traits: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """Yield the traits that differ from the usual; numbers by name alone, since they come from sizes."""
    for name, value in traits.items():
        if name in usual and value == usual[name]:
            continue
        if isinstance(value, QKNormSpec):
            value = f"{value.over}, after rotation" if value.after_rotation else value.over
        if value is True or name == "attention.v_width" or isinstance(value, float) or is_dataclass(value):
            yield f"`{name}`"
        else:
            yield f"`{name}={value}`"


def _layers(spec: DecoderSpec | StreamDecoderSpec) -> str:
    count = len(spec.layers)
    windows = sum(attention.window is not None for attention in _attentions(spec))
    chunks = sum(attention.chunk is not None for attention in _attentions(spec))
    unrotated = sum(attention.rotary is None for attention in _attentions(spec))
    scaled = sum(attention.q_scale is not None for attention in _attentions(spec))
    found = []
    for number, what in (
        (windows, "have a window"),
        (chunks, "attend within chunks"),
        (unrotated, "have no rotation"),
        (scaled, "scale queries by position"),
    ):
        if number:
            found.append(f"all {what}" if number == count else f"{number} of {count} {what}")
    sinks = sum(attention.sinks for attention in _attentions(spec))
    if 0 < sinks < count:  # in all layers, they are a trait of the first
        found.append(f"{sinks} of {count} have sinks")
    if len({attention.kv_heads for attention in _attentions(spec)}) > 1:
        found.append("key-value heads by layer")
    shared = sum(isinstance(block, SharedAttentionSpec) for layer in spec.layers for block in _blocks(layer))
    if shared:
        found.append(f"{shared} of {count} read the cache of another")
    if len(spec.ropes) > 1:
        found.append(f"{len(spec.ropes)} rotary tables")
    return ", ".join(found) or "–"
