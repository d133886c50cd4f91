"""Read adapter_config.json of a PEFT folder: ranks, scales, and what an adapter must not ask for.

The fields are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora). A field that would
change the results in a way that Ingot does not compute is refused by its name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ingot.ir.errors import AdapterError
from ingot.ir.json_text import parse_json

CONFIG = "adapter_config.json"
MAX_RANK = 1024  # twice the largest rank that vLLM serves (`max_lora_rank`)

# Fields that must have no effect, with what they ask for.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias of lora_B",
    "modules_to_save": "whole modules besides the low-rank factors",
    "target_parameters": "factors of parameters that belong to no linear",
    "trainable_token_indices": "trained rows of an embedding",
    "layer_replication": "repeated layers",
    "megatron_config": "layers of Megatron",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "routing among adapters (Arrow)",
}
# Initializations that change the base weights, so that the factors alone do not describe the adapter.
_CHANGES_BASE = frozenset({"pissa", "olora", "corda", "lora_ga"})
# Fields that describe training or the file, or that are read below.
_KNOWN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "bias"),
        *("layers_to_transform", "layers_pattern", "exclude_modules", "fan_in_fan_out", "init_lora_weights"),
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size"),
        *("megatron_core", "peft_version", "ensure_weight_tying", "inject_adapter_in_model"),
    }
)
# A pattern of a file could make Python's regular expressions search for ever. These limits bound the search: the names
# are short, and a few quantifiers without nesting take polynomial time of low degree.
_MAX_PATTERN = 300
_MAX_QUANTIFIERS = 3
_QUANTIFIERS = re.compile(r"(?<!\\)[*+?{]")
Number = TypeVar("Number", int, float)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LoraConfig:
    """The fields of adapter_config.json that determine results.

    rank             the rank of modules that `rank_pattern` does not name
    alpha            the numerator of the scale of modules that `alpha_pattern` does not name
    rslora           whether the scale is alpha / sqrt(rank), not alpha / rank (https://arxiv.org/abs/2312.03732)
    rank_pattern     pattern of a module's name -> its rank
    alpha_pattern    pattern of a module's name -> its alpha
    target_modules   the ends of the names of adapted modules; None: the file uses a pattern or "all-linear"
    layers           the numbers of the adapted layers; None: all
    transposed       whether the base weights are stored as [in, out] (`fan_in_fan_out`)
    """

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | None = None
    layers: frozenset[int] | None = None
    transposed: bool = False

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the matmul of a module's factors, as PEFT computes it."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def why_not(self, module: str) -> str:
        """Return why PEFT would not apply factors of `module`; "" if it would."""
        if self.target_modules is not None and not any(
            module == end or module.endswith(f".{end}") for end in self.target_modules
        ):
            return f"target_modules has only {', '.join(self.target_modules)[:200]}"
        layer = _LAYER.search(module)
        if self.layers is not None and layer is not None and int(layer[1]) not in self.layers:
            return f"layers_to_transform lacks layer {layer[1]}"
        return ""


def read_lora_config(data: bytes, where: str) -> LoraConfig:
    """Return the fields of an adapter_config.json that determine results. `data` is the file's content.

    `where` names the file in errors. Raises AdapterError if the file is malformed, or if it describes something that
    Ingot does not compute.
    """
    try:
        given = parse_json(data)
    except ValueError as error:
        raise AdapterError(f"{CONFIG} is not JSON: {str(error)[:200]}", where=where, expected="a JSON object") from None
    if not isinstance(given, dict):
        raise AdapterError(f"{CONFIG} is a {type(given).__name__}", where=where, expected="a JSON object")
    _refuse(given, where)
    rank = _int(given, "r", where, least=1)
    ranks = {
        name: _rank(value, f"rank_pattern of {name:.80}", where) for name, value in _dict(given, "rank_pattern", where)
    }
    alphas = {
        name: _number(value, f"alpha_pattern of {name:.80}", where)
        for name, value in _dict(given, "alpha_pattern", where)
    }
    for pattern in (*ranks, *alphas):
        _check_pattern(pattern, where)
    return LoraConfig(
        rank=rank,
        alpha=_number(given.get("lora_alpha", 8), "lora_alpha", where),  # 8: PEFT's default
        rslora=_bool(given, "use_rslora", where),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=_targets(given.get("target_modules"), where),
        layers=_layers(given.get("layers_to_transform"), where),
        transposed=_bool(given, "fan_in_fan_out", where),
    )


def _refuse(given: Mapping[str, Any], where: str) -> None:
    if given.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {given.get('peft_type')!r:.80}", where=where, expected="'LORA'")
    for name, what in _REFUSED.items():
        if given.get(name):
            raise AdapterError(
                f"the adapter uses {name}: {what}", where=where, expected="plain LoRA", hint="merge it with PEFT"
            )
    if given.get("bias", "none") != "none":
        raise AdapterError(
            f"bias is {given['bias']!r:.80}: the adapter changes biases of the base model",
            where=where,
            expected="'none'",
            hint="merge it with PEFT",
        )
    init = given.get("init_lora_weights", True)
    if isinstance(init, str) and any(init.lower().startswith(name) for name in _CHANGES_BASE):
        raise AdapterError(
            f"init_lora_weights is {init!r:.80}, which changes the base weights",
            where=where,
            expected="an adapter to the weights of the checkpoint",
            hint="convert it with PEFT's path_initial_model_for_weight_conversion",
        )
    unknown = [name for name, value in given.items() if name not in _KNOWN and name not in _REFUSED and value]
    if unknown:
        raise AdapterError(
            f"the field '{unknown[0]:.80}' is not known", where=where, expected="fields of PEFT's LoraConfig"
        )


def _first_match(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT's `get_pattern_key`."""
    return next((value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", module)), default)


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"the pattern {pattern!r:.80} is malformed: {error}", where=where) from None
    counted = len(_QUANTIFIERS.findall(pattern))
    if len(pattern) > _MAX_PATTERN or counted > _MAX_QUANTIFIERS or re.search(r"\)[*+?{]|\(\?|\\\d", pattern):
        raise AdapterError(
            f"the pattern {pattern!r:.80} is too complex",
            where=where,
            expected=f"the name of a module, or a pattern with at most {_MAX_QUANTIFIERS} quantifiers, none of a group",
        )


def _targets(value: object, where: str) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):  # a pattern; the tensors say which modules it matched
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise AdapterError(f"target_modules is {value!r:.80}", where=where, expected="a list of names, or a pattern")
    return tuple(value)


def _layers(value: object, where: str) -> frozenset[int] | None:
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in listed):
        raise AdapterError(f"layers_to_transform is {value!r:.80}", where=where, expected="numbers of layers")
    return frozenset(map(int, listed)) if listed else None


def _dict(given: Mapping[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
    value = given.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{name} is {value!r:.80}", where=where, expected="an object")
    return list(value.items())


def _int(given: Mapping[str, Any], name: str, where: str, least: int) -> int:
    return _rank(given.get(name, 8), name, where, least)  # 8: PEFT's default


def _rank(value: object, name: str, where: str, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_RANK:
        raise AdapterError(
            f"{name} is {value!r:.80}", where=where, expected=f"a whole number from {least} to {MAX_RANK}"
        )
    return value


def _number(value: object, name: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise AdapterError(f"{name} is {value!r:.80}", where=where, expected="a finite number")
    return float(value)


def _bool(given: Mapping[str, Any], name: str, where: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        raise AdapterError(f"{name} is {value!r:.80}", where=where, expected="true or false")
    return value
