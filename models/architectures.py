"""The table of architectures: for each name in a config.json, the reader of its fields and the model's definition."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ingot.ir.errors import ConfigError
from ingot.ir.features.feature import SAMPLED, EndingUse
from ingot.ir.program import ModelSpec
from ingot.ir.types import TensorType
from ingot.models.blocks.block import expected_matches
from ingot.models.blocks.decoder import Decoder, DecoderSpec
from ingot.models.blocks.stream_decoder import StreamDecoder, StreamDecoderSpec
from ingot.models.config import MAX_SIZE, ConfigReader, RopeSpec
from ingot.models.families import (
    baichuan,
    bloom,
    cohere,
    decilm,
    exaone,
    falcon,
    gemma,
    gemma3n,
    glm,
    gpt2,
    gpt_neox,
    gptj,
    granite,
    hunyuan,
    internlm2,
    llama,
    mimo,
    minicpm,
    mpt,
    nemotron,
    olmo,
    opt,
    orion,
    persimmon,
    phi,
    qwen,
    solar,
    stablelm,
    starcoder2,
    telechat,
)
from ingot.models.known_fields import known_fields, spec_words
from ingot.models.unknown_fields import Unknown, refuse_meaning, unknown_fields

# The default inputs of an entry's module: the tokens' ids, positions and sequences, and the indices of the tokens that
# get logits.
INPUTS: Mapping[str, TensorType] = {
    name: TensorType(torch.int32, (dim,))
    for name, dim in {"tokens": "T", "positions": "T", "token_seqs": "T", "logit_rows": "L"}.items()
}


@dataclass(frozen=True)
class Entry:
    """One program of a model, such as `main` or a draft: the module to trace, and its inputs and outputs.

    inputs    types of the module's arguments, by name; default: tokens, positions, sequences and rows of logits
    outputs   names of the module's results, in order; the module returns a tensor or a tuple
    ending    the last part of the program, which consumes the outputs, such as sampling
    """

    module: nn.Module
    inputs: Mapping[str, TensorType] = field(default_factory=lambda: INPUTS)
    outputs: tuple[str, ...] = ("logits",)
    ending: EndingUse = SAMPLED

    @property
    def expected_matches(self) -> dict[str, int]:
        """Return how many rewrites each pass must apply to the program, by the pass's name. Fewer are an error."""
        return {"insert-ending": 1, **expected_matches(self.module)}


@dataclass(frozen=True)
class Definition:
    """A model definition: functions of a spec, such as DecoderSpec, that make the model's programs (entries).

    build             returns the module of the entry `main`, from the spec, the dtype and the longest context
    ignored           returns regular expressions of tensor names that a checkpoint may contain and nothing reads
    optional_prefix   returns the prefix that a checkpoint may omit in all tensor names; "" if there is none
    more_entries      returns the other entries by name, from the spec and the module of `build`; an entry named `main`
                      replaces that module
    round             the names of the entries that run in each step, in order
    checkpoints       aliases of further checkpoints; recipes name their tensors "alias:tensor"
    """

    build: Callable[[Any, torch.dtype, int], nn.Module]
    ignored: Callable[[Any], tuple[str, ...]]
    optional_prefix: Callable[[Any], str] = lambda spec: ""
    more_entries: Callable[[Any, nn.Module], Mapping[str, Entry]] = lambda spec, module: {}
    round: tuple[str, ...] = ("main",)
    checkpoints: tuple[str, ...] = ()


DECODER = Definition(build=Decoder, ignored=DecoderSpec.ignored, optional_prefix=DecoderSpec.optional_prefix)
STREAM_DECODER = Definition(build=StreamDecoder, ignored=StreamDecoderSpec.ignored)


@dataclass(frozen=True)
class Architecture:
    """One row of the table of architectures: how to read the config.json, and how to make the model.

    family       the name of the model family
    read         returns the spec that the fields of a config.json describe
    definition   makes the model's programs from that spec
    positions    the config field of the longest context
    default      the longest context if that field is missing
    part         the config field that holds the fields of the text part, for a model with other parts too
    """

    family: str
    read: Callable[[ConfigReader], Any]
    definition: Definition
    positions: str = "max_position_embeddings"
    default: int = 2048
    part: str | None = None

    def fields(self, config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
        """Return the fields of a config.json, merged with those of its text part if they are in a nested object.

        `source` is the file's name for errors. Raises ConfigError if the nested object is missing.
        """
        if self.part is None:
            return config
        own = config.get(self.part)
        if not isinstance(own, dict):
            raise ConfigError(f"field '{self.part}' is no object", where=source, expected="the fields of the text part")
        return {**own, **{name: value for name, value in config.items() if value is not None}}


# TeleChat 2 has several rows: its config.json files, its code and vLLM name it differently.
_TELECHAT2 = Architecture("telechat2", telechat.telechat2, DECODER, "training_seqlen", 8192)
ARCHITECTURES: Mapping[str, Architecture] = {
    "ArceeForCausalLM": Architecture("arcee", llama.arcee, DECODER, default=4096),
    "BaichuanForCausalLM": Architecture("baichuan", baichuan.baichuan, DECODER, "model_max_length", 4096),
    "BaiChuanForCausalLM": Architecture("baichuan", baichuan.baichuan_7b, DECODER, default=4096),
    "BloomForCausalLM": Architecture("bloom", bloom.bloom, DECODER, positions="seq_length"),
    "CodeGenForCausalLM": Architecture("codegen", gptj.codegen, DECODER, positions="n_positions"),
    "Cohere2ForCausalLM": Architecture("cohere2", cohere.cohere2, DECODER),
    "CohereForCausalLM": Architecture("cohere", cohere.cohere, DECODER),
    "CwmForCausalLM": Architecture("cwm", llama.cwm, DECODER),
    "DeciLMForCausalLM": Architecture("decilm", decilm.decilm, DECODER),
    "Ernie4_5ForCausalLM": Architecture("ernie4_5", llama.ernie4_5, DECODER),
    "Exaone4ForCausalLM": Architecture("exaone4", exaone.exaone4, DECODER),
    "ExaoneForCausalLM": Architecture("exaone", exaone.exaone, DECODER),
    "FalconForCausalLM": Architecture("falcon", falcon.falcon, DECODER),
    "Gemma2ForCausalLM": Architecture("gemma2", gemma.gemma2, DECODER),
    "Gemma3ForCausalLM": Architecture("gemma3", gemma.gemma3, DECODER),
    "Gemma3nForCausalLM": Architecture("gemma3n", gemma3n.gemma3n, STREAM_DECODER, default=32_768),
    "Gemma3nForConditionalGeneration": Architecture(
        "gemma3n", gemma3n.text_part, STREAM_DECODER, default=32_768, part="text_config"
    ),
    "GPT2LMHeadModel": Architecture("gpt2", gpt2.gpt2, DECODER),
    "GPTJForCausalLM": Architecture("gptj", gptj.gptj, DECODER, positions="n_positions"),
    "GPTNeoXForCausalLM": Architecture("gpt_neox", gpt_neox.gpt_neox, DECODER),
    "GemmaForCausalLM": Architecture("gemma", gemma.gemma, DECODER),
    "Glm4ForCausalLM": Architecture("glm4", glm.glm4, DECODER),
    "GlmForCausalLM": Architecture("glm", glm.glm, DECODER),
    "GraniteForCausalLM": Architecture("granite", granite.granite, DECODER),
    "HeliumForCausalLM": Architecture("helium", llama.helium, DECODER),
    "HunYuanDenseV1ForCausalLM": Architecture("hunyuan_v1_dense", hunyuan.hunyuan_v1_dense, DECODER),
    "HyperCLOVAXForCausalLM": Architecture("hyperclovax", granite.hyperclovax, DECODER),
    "InternLM2ForCausalLM": Architecture("internlm2", internlm2.internlm2, DECODER),
    "LlamaForCausalLM": Architecture("llama", llama.llama, DECODER),
    "MiMoForCausalLM": Architecture("mimo", mimo.mimo, DECODER),
    "MiniCPMForCausalLM": Architecture("minicpm", minicpm.minicpm, DECODER),
    "MinistralForCausalLM": Architecture("ministral", llama.ministral, DECODER),
    "MPTForCausalLM": Architecture("mpt", mpt.mpt, DECODER, positions="max_seq_len"),
    "MistralForCausalLM": Architecture("mistral", llama.mistral, DECODER),
    "MptForCausalLM": Architecture("mpt", mpt.mpt, DECODER, positions="max_seq_len"),
    "NemotronForCausalLM": Architecture("nemotron", nemotron.nemotron, DECODER, default=4096),
    "OPTForCausalLM": Architecture("opt", opt.opt, DECODER),
    "Olmo2ForCausalLM": Architecture("olmo2", olmo.olmo2, DECODER),
    "Olmo3ForCausalLM": Architecture("olmo3", olmo.olmo3, DECODER),
    "OlmoForCausalLM": Architecture("olmo", olmo.olmo, DECODER),
    "OrionForCausalLM": Architecture("orion", orion.orion, DECODER, default=4096),
    "PersimmonForCausalLM": Architecture("persimmon", persimmon.persimmon, DECODER, default=16384),
    "Phi3ForCausalLM": Architecture("phi3", phi.phi3, DECODER),
    "PhiForCausalLM": Architecture("phi", phi.phi, DECODER),
    "Qwen2ForCausalLM": Architecture("qwen2", qwen.qwen2, DECODER),
    "Qwen3ForCausalLM": Architecture("qwen3", qwen.qwen3, DECODER),
    "RWForCausalLM": Architecture("falcon", falcon.refined_web, DECODER),
    "SeedOssForCausalLM": Architecture("seed_oss", llama.seed_oss, DECODER),
    "SmolLM3ForCausalLM": Architecture("smollm3", llama.smollm3, DECODER),
    "SolarForCausalLM": Architecture("solar", solar.solar, DECODER),
    "StableLMEpochForCausalLM": Architecture("stablelm", stablelm.stablelm_epoch, DECODER, default=4096),
    "StableLmForCausalLM": Architecture("stablelm", stablelm.stablelm, DECODER, default=4096),
    "Starcoder2ForCausalLM": Architecture("starcoder2", starcoder2.starcoder2, DECODER, default=4096),
    "TeleChat2ForCausalLM": _TELECHAT2,
    "TeleChatForCausalLM": _TELECHAT2,
    "Telechat2ForCausalLM": _TELECHAT2,
    "TelechatForCausalLM": _TELECHAT2,
    "TeleFLMForCausalLM": Architecture("teleflm", minicpm.teleflm, DECODER),
}


def architecture_of(config: Mapping[str, Any], source: str) -> tuple[str, Architecture]:
    """Return the architecture name in a config.json, and its row of the table.

    `source` is the file's name for errors. Raises ConfigError, with the nearest known name, if there is no such row.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"field 'architectures' is {names!r}", where=source, expected="a list with one name")
    name = names[0]
    if name not in ARCHITECTURES:
        nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)
        raise ConfigError(
            f"architecture '{name}' is not supported",
            where=source,
            expected=", ".join(ARCHITECTURES),
            hint=f"the nearest supported one is '{nearest[0]}'",
        )
    return name, ARCHITECTURES[name]


def read_spec(config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """Return the ModelSpec that the fields of a config.json describe. `source` is the file's name for errors.

    Raises ConfigError for an unsupported architecture, an invalid value, or a field whose effect is not supported.
    """
    name, architecture = architecture_of(config, source)
    config = architecture.fields(config, source)
    reader = ConfigReader(config, source)
    bos = reader.token_ids("bos_token_id")
    dims = architecture.read(reader)
    spec = ModelSpec(
        architecture=name,
        family=architecture.family,
        dtype=reader.dtype(),
        vocab_size=dims.vocab,
        max_position=dims.embedding.most_positions or _max_position(reader, architecture, dims.ropes),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        dims=dims,
    )
    asked = {"architectures", *reader.asked}
    spec = replace(spec, config={field: value for field, value in config.items() if field in asked})
    refuse_meaning(_unknown(config, spec), architecture.family, source)
    return spec


def ignored_fields(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of fields that are set in a config.json and that no model family's reader knows.

    Fields that are known to have no effect are left out.
    """
    return tuple(one.name for one in _unknown(config, spec) if not one.about)


def _unknown(config: Mapping[str, Any], spec: ModelSpec) -> tuple[Unknown, ...]:
    """Return the fields that the family's reader does not know and whose value would enable something."""
    known = known_fields(ARCHITECTURES[spec.architecture].read) | spec.config.keys()
    return tuple(unknown_fields(config, known, _who_reads))


def _who_reads(field: str) -> str:
    """Return a phrase that names up to three families that read a config field; "" if none does.

    Also return "" if the name is a field of block specs, which readers contain for another reason.
    """
    if field in spec_words():
        return ""
    families = list(dict.fromkeys(one.family for one in ARCHITECTURES.values() if field in known_fields(one.read)))
    more = f" and {len(families) - 3} others" if len(families) > 3 else ""
    return f"what definitions of {', '.join(families[:3])}{more} read" if families else ""


def _max_position(config: ConfigReader, architecture: Architecture, ropes: tuple[RopeSpec, ...]) -> int:
    """Return the longest context in positions, derived as in vLLM (config/model.py).

    For some rope types, the config has the length before scaling, which is multiplied by the factor. Gemma 3 and 3n
    have the scaled length.
    """
    given = config.integer(architecture.positions, architecture.default)
    if not ropes:
        return given
    rope = ropes[0]
    if rope.rope_type == "yarn":
        return _length(rope.number("original_max_position") * rope.number("factor"), config)
    if rope.rope_type in ("linear", "dynamic") and "gemma3" not in str(config.fields.get("model_type")):
        return _length(given * rope.number("factor"), config)
    return given


def _length(positions: float, config: ConfigReader) -> int:
    if not 1 <= positions <= MAX_SIZE:
        raise ConfigError(
            f"rope scaling results in a context of {positions:g}", where=config.source, expected=f"1 to {MAX_SIZE}"
        )
    return int(positions)
