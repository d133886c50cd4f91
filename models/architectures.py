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
    dbrx,
    decilm,
    deepseek,
    ernie,
    exaone,
    falcon,
    gemma,
    gemma3n,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    internlm2,
    llama,
    llama4,
    longcat,
    mimo,
    mimo_v2,
    minicpm,
    mixtral,
    mpt,
    nemotron,
    olmo,
    opt,
    orion,
    persimmon,
    phi,
    phimoe,
    qwen,
    qwen_moe,
    solar,
    stablelm,
    starcoder2,
    step3,
    telechat,
    transmla,
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
    """One program of a model, such as `main` or the program of a draft model.

    module    the module that is traced into the program
    inputs    argument name of the module -> tensor type; default: tokens, positions, token_seqs and logit_rows
    outputs   names of the module's results, in order. The module returns one tensor or a tuple.
    ending    what the program does with the outputs at its end, such as sampling a token
    """

    module: nn.Module
    inputs: Mapping[str, TensorType] = field(default_factory=lambda: INPUTS)
    outputs: tuple[str, ...] = ("logits",)
    ending: EndingUse = SAMPLED

    @property
    def expected_matches(self) -> dict[str, int]:
        """Return how many rewrites each pass must apply to the program: pass name -> count.

        Compiling fails if a pass applies fewer.
        """
        return {"insert-ending": 1, **expected_matches(self.module)}


@dataclass(frozen=True)
class Definition:
    """How a model is built from its spec, such as a DecoderSpec. A model is one or more programs.

    build             function: spec, dtype, longest context -> the module of the program `main`
    ignored           function: spec -> regular expressions of tensor names. A checkpoint may hold these tensors, and
                      Ingot does not read them.
    optional_prefix   function: spec -> a prefix of all tensor names, which some checkpoints omit; "": there is none
    more_entries      function: spec, module of `build` -> further programs by name, such as a draft model. A program
                      named `main` replaces the one of `build`.
    round             names of the programs that run in each step, in order
    checkpoints       names of further checkpoints, such as a draft model's. A recipe calls their tensors "NAME:tensor".
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
    """One row of the table of architectures: how to read a config.json and build its model.

    family       name of the model family, such as "llama"
    read         function that reads the fields of a config.json and returns the model's spec
    definition   builds the model's programs from the spec
    positions    the field with the longest context
    default      the longest context if that field is missing
    part         the field with a nested object for the text model, such as "text_config" in multimodal models; None: no
                 such object
    """

    family: str
    read: Callable[[ConfigReader], Any]
    definition: Definition
    positions: str = "max_position_embeddings"
    default: int = 2048
    part: str | None = None

    def fields(self, config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
        """Return the text model's fields of a config.json: the nested object `part`, if set, and the top level.

        If both set a field, the top level counts. `source` names the file in errors. Raises ConfigError if the nested
        object is missing.
        """
        if self.part is None:
            return config
        own = config.get(self.part)
        if not isinstance(own, dict):
            raise ConfigError(f"field '{self.part}' is no object", where=source, expected="the fields of the text part")
        return {**own, **{name: value for name, value in config.items() if value is not None}}


# TeleChat 2 has several rows: its config.json files, its code and vLLM name it differently.
_TELECHAT2 = Architecture("telechat2", telechat.telechat2, DECODER, "training_seqlen", 8192)
# Step3 has two rows: its config.json names it otherwise than its code, which writes the name of its class.
_STEP3 = Architecture("step3", step3.text_part, DECODER, "max_position_embedding", step3.CONTEXT, part="text_config")
ARCHITECTURES: Mapping[str, Architecture] = {
    "ArceeForCausalLM": Architecture("arcee", llama.arcee, DECODER, default=4096),
    "BaichuanForCausalLM": Architecture("baichuan", baichuan.baichuan, DECODER, "model_max_length", 4096),
    "BaiChuanForCausalLM": Architecture("baichuan", baichuan.baichuan_7b, DECODER, default=4096),
    "BloomForCausalLM": Architecture("bloom", bloom.bloom, DECODER, positions="seq_length"),
    "CodeGenForCausalLM": Architecture("codegen", gptj.codegen, DECODER, positions="n_positions"),
    "Cohere2ForCausalLM": Architecture("cohere2", cohere.cohere2, DECODER),
    "CohereForCausalLM": Architecture("cohere", cohere.cohere, DECODER),
    "CwmForCausalLM": Architecture("cwm", llama.cwm, DECODER),
    "DbrxForCausalLM": Architecture("dbrx", dbrx.dbrx, DECODER, positions="max_seq_len"),
    "DeciLMForCausalLM": Architecture("decilm", decilm.decilm, DECODER),
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2", deepseek.deepseek_v2, DECODER),
    "DeepseekV32ForCausalLM": Architecture("deepseek_v32", deepseek.deepseek_v32, DECODER, default=163_840),
    "DeepseekV3ForCausalLM": Architecture("deepseek_v3", deepseek.deepseek_v3, DECODER, default=4096),
    "Ernie4_5ForCausalLM": Architecture("ernie4_5", llama.ernie4_5, DECODER),
    "Ernie4_5_MoeForCausalLM": Architecture("ernie4_5_moe", ernie.ernie4_5_moe, DECODER, default=131_072),
    "Exaone4ForCausalLM": Architecture("exaone4", exaone.exaone4, DECODER),
    "ExaoneForCausalLM": Architecture("exaone", exaone.exaone, DECODER),
    "ExaoneMoeForCausalLM": Architecture("exaone_moe", exaone.exaone_moe, DECODER),
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
    "GptOssForCausalLM": Architecture("gpt_oss", gpt_oss.gpt_oss, DECODER, default=131_072),
    "GemmaForCausalLM": Architecture("gemma", gemma.gemma, DECODER),
    "Glm4ForCausalLM": Architecture("glm4", glm.glm4, DECODER),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", glm.glm4_moe, DECODER, default=131_072),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite", deepseek.glm4_moe_lite, DECODER, default=202_752),
    "GlmForCausalLM": Architecture("glm", glm.glm, DECODER),
    "GraniteForCausalLM": Architecture("granite", granite.granite, DECODER),
    "GraniteMoeForCausalLM": Architecture("granitemoe", granite.granitemoe, DECODER),
    "HeliumForCausalLM": Architecture("helium", llama.helium, DECODER),
    "HunYuanDenseV1ForCausalLM": Architecture("hunyuan_v1_dense", hunyuan.hunyuan_v1_dense, DECODER),
    "HunYuanMoEV1ForCausalLM": Architecture("hunyuan_v1_moe", hunyuan.hunyuan_v1_moe, DECODER),
    "HyperCLOVAXForCausalLM": Architecture("hyperclovax", granite.hyperclovax, DECODER),
    "InternLM2ForCausalLM": Architecture("internlm2", internlm2.internlm2, DECODER),
    "Llama4ForCausalLM": Architecture("llama4", llama4.llama4, DECODER, default=131_072),
    "Llama4ForConditionalGeneration": Architecture(
        "llama4", llama4.text_part, DECODER, default=131_072, part="text_config"
    ),
    "LlamaForCausalLM": Architecture("llama", llama.llama, DECODER),
    "LlamaMLAForCausalLM": Architecture("llama_mla", transmla.llama_mla, DECODER),
    "LongcatFlashForCausalLM": Architecture("longcat_flash", longcat.longcat_flash, DECODER, default=131_072),
    "MiMoForCausalLM": Architecture("mimo", mimo.mimo, DECODER),
    "MiMoV2FlashForCausalLM": Architecture("mimo_v2_flash", mimo_v2.mimo_v2_flash, DECODER, default=131_072),
    "MiniCPMForCausalLM": Architecture("minicpm", minicpm.minicpm, DECODER),
    "MinistralForCausalLM": Architecture("ministral", llama.ministral, DECODER),
    "MPTForCausalLM": Architecture("mpt", mpt.mpt, DECODER, positions="max_seq_len"),
    "Mistral4ForCausalLM": Architecture("mistral4", deepseek.mistral4, DECODER, default=1_048_576),
    "MistralForCausalLM": Architecture("mistral", llama.mistral, DECODER),
    "MixtralForCausalLM": Architecture("mixtral", mixtral.mixtral, DECODER, default=131_072),
    "MptForCausalLM": Architecture("mpt", mpt.mpt, DECODER, positions="max_seq_len"),
    "NemotronForCausalLM": Architecture("nemotron", nemotron.nemotron, DECODER, default=4096),
    "OPTForCausalLM": Architecture("opt", opt.opt, DECODER),
    "Olmo2ForCausalLM": Architecture("olmo2", olmo.olmo2, DECODER),
    "Olmo3ForCausalLM": Architecture("olmo3", olmo.olmo3, DECODER),
    "OlmoForCausalLM": Architecture("olmo", olmo.olmo, DECODER),
    "OlmoeForCausalLM": Architecture("olmoe", olmo.olmoe, DECODER, default=4096),
    "OrionForCausalLM": Architecture("orion", orion.orion, DECODER, default=4096),
    "PersimmonForCausalLM": Architecture("persimmon", persimmon.persimmon, DECODER, default=16384),
    "Phi3ForCausalLM": Architecture("phi3", phi.phi3, DECODER),
    "PhiForCausalLM": Architecture("phi", phi.phi, DECODER),
    "PhimoeForCausalLM": Architecture("phimoe", phimoe.phimoe, DECODER, default=131_072),
    "PhiMoEForCausalLM": Architecture("phimoe", phimoe.phimoe, DECODER, default=131_072),
    "Qwen2ForCausalLM": Architecture("qwen2", qwen.qwen2, DECODER),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", qwen_moe.qwen2_moe, DECODER, default=32_768),
    "Qwen3ForCausalLM": Architecture("qwen3", qwen.qwen3, DECODER),
    "Qwen3MLAForCausalLM": Architecture("qwen3_mla", transmla.qwen3_mla, DECODER),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", qwen_moe.qwen3_moe, DECODER, default=32_768),
    "RWForCausalLM": Architecture("falcon", falcon.refined_web, DECODER),
    "SeedOssForCausalLM": Architecture("seed_oss", llama.seed_oss, DECODER),
    "SmolLM3ForCausalLM": Architecture("smollm3", llama.smollm3, DECODER),
    "SolarForCausalLM": Architecture("solar", solar.solar, DECODER),
    "StableLMEpochForCausalLM": Architecture("stablelm", stablelm.stablelm_epoch, DECODER, default=4096),
    "StableLmForCausalLM": Architecture("stablelm", stablelm.stablelm, DECODER, default=4096),
    "Starcoder2ForCausalLM": Architecture("starcoder2", starcoder2.starcoder2, DECODER, default=4096),
    "Step3TextForCausalLM": Architecture("step3", step3.step3_text, DECODER, "max_position_embedding", step3.CONTEXT),
    "Step3VLForConditionalGeneration": _STEP3,
    "Step3vForConditionalGeneration": _STEP3,
    "TeleChat2ForCausalLM": _TELECHAT2,
    "TeleChatForCausalLM": _TELECHAT2,
    "Telechat2ForCausalLM": _TELECHAT2,
    "TelechatForCausalLM": _TELECHAT2,
    "TeleFLMForCausalLM": Architecture("teleflm", minicpm.teleflm, DECODER),
}


def architecture_of(config: Mapping[str, Any], source: str) -> tuple[str, Architecture]:
    """Return the architecture name in a config.json, and its row of the table of architectures.

    `source` names the file in errors. Raises ConfigError for an unknown name, and suggests the nearest known one.
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
    """Return the description of a model (ModelSpec) from the fields of its config.json.

    `source` names the file in errors. Raises ConfigError for an unsupported architecture, an invalid value, or a field
    with an unsupported effect.
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
    """Return the names of config.json fields that no model family reads, so that the user can be warned.

    Fields that have no effect are left out, such as fields that are null or false. Those of a text part are named as
    if they were at the top level.
    """
    fields = ARCHITECTURES[spec.architecture].fields(config, "config.json")
    return tuple(one.name for one in _unknown(fields, spec) if not one.about)


def _unknown(config: Mapping[str, Any], spec: ModelSpec) -> tuple[Unknown, ...]:
    """Return the config.json fields that the code for the model's family does not read, but that may have an effect."""
    known = known_fields(ARCHITECTURES[spec.architecture].read) | spec.config.keys()
    return tuple(unknown_fields(config, known, _who_reads))


def _who_reads(field: str) -> str:
    """Return which families read a config field, as in "what definitions of llama, qwen2 read"; "" if none does.

    At most three are named. The result is also "" for field names of specs, such as "head_dim". Code that reads configs
    contains them as keyword arguments, even if it does not read such a config field.
    """
    if field in spec_words():
        return ""
    families = list(dict.fromkeys(one.family for one in ARCHITECTURES.values() if field in known_fields(one.read)))
    more = f" and {len(families) - 3} others" if len(families) > 3 else ""
    return f"what definitions of {', '.join(families[:3])}{more} read" if families else ""


def _max_position(config: ConfigReader, architecture: Architecture, ropes: tuple[RopeSpec, ...]) -> int:
    """Return the longest context in tokens, computed as in vLLM (config/model.py).

    For the rope types yarn, linear and dynamic, it is the length before scaling times the factor. Gemma 3 and 3n
    differ: their config holds the scaled length.
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
