"""vLLM's `EngineArgs`: the arguments of an engine, their options on a command line, and their meaning for Ingot."""

import argparse
import difflib
import json
import logging
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

from ingot.ir.errors import OptionError
from ingot.vllm_api.argument_meanings import (
    FORMER,
    IN_CODE_ONLY,
    MEANINGS,
    NO_EFFECT,
    OF_ABSENT_FEATURES,
    REFUSED,
    defaults,
    meanings,
)
from ingot.vllm_api.quantization import read_quantization

_DEFAULTS = defaults()
_EMPTY: tuple[object, ...] = (None, "", {}, [], set(), ())
_log = logging.getLogger("ingot")
_Fields: Any = make_dataclass("_Fields", [(name, Any, field(default=value)) for name, value in _DEFAULTS.items()])
Parser = TypeVar("Parser")


class EngineArgs(_Fields):  # type: ignore[misc]
    """The arguments of an engine, under vLLM's names and with its defaults. It is a dataclass.

    `argument_meanings` says what each argument means for Ingot. An argument that has no meaning here is refused unless
    it has its default. The constructor raises OptionError for such an argument, and for an unknown name.
    """

    def __init__(self, model: Any = _DEFAULTS["model"], **given: Any) -> None:
        for name in given:
            if name in OF_ABSENT_FEATURES:
                raise OptionError(
                    f"{name} is not supported",
                    where=f"EngineArgs.{name}",
                    expected=f"no {name}",
                    hint="it tunes a feature of vLLM that Ingot does not have",
                )
            if name in FORMER:
                raise OptionError(
                    f"{name} is an argument of earlier versions of vLLM",
                    where=f"EngineArgs.{name}",
                    expected=f"no {name}",
                    hint=FORMER[name],
                )
            if name not in _DEFAULTS:
                near = difflib.get_close_matches(name, _DEFAULTS, n=1)
                raise OptionError(
                    f"unknown engine argument '{name}'",
                    where="EngineArgs",
                    expected="an argument of vLLM's EngineArgs",
                    hint=f"did you mean '{near[0]}'?" if near else "options of compiling: compile-model, or ingot.LLM",
                )
        super().__init__(model=model, **given)
        self._check()

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add an option for each argument to an argparse parser or a group of one, and return it."""
        texts = meanings()
        for name, default in _DEFAULTS.items():
            if name not in IN_CODE_ONLY:
                how: dict[str, Any] = {"type": _text_or_json}
                if isinstance(default, bool) or name in _SWITCHES:
                    how = {"action": argparse.BooleanOptionalAction}
                elif isinstance(default, int | float) or name in _NUMBERS:
                    how = {"type": _number}
                option, help_text = f"--{name.replace('_', '-')}", texts[name].replace("%", "%%")
                parser.add_argument(option, default=default, help=help_text, **how)  # type: ignore[attr-defined]
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Return the arguments that a parser with the options of `add_cli_args` has read. Others are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in _DEFAULTS})

    def _check(self) -> None:
        for reason, arguments in REFUSED.items():
            for name, default in arguments.items():
                value = getattr(self, name)
                if not _equal(value, default):
                    raise OptionError(
                        f"{name} = {value!r:.80} is not supported",
                        where=f"EngineArgs.{name}",
                        expected=f"{default!r}, or no {name}",
                        hint=reason,
                    )
        for name, values in _ONLY.items():
            if getattr(self, name) not in values:
                raise self._refused(name, " or ".join(map(repr, values)))
        for name, (kinds, expected) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise self._refused(name, expected)
        if self.quantization is not None:
            read_quantization(self.quantization)
        for reason, arguments in NO_EFFECT.items():
            for name, default in arguments.items():
                if not _equal(getattr(self, name), default):
                    _log.warning("%s has no effect: %s", name, reason)

    def _refused(self, name: str, expected: str) -> OptionError:
        """Return the error for the value of an argument. `expected` describes the values that it may have."""
        return OptionError(
            f"{name} = {getattr(self, name)!r:.80} is not supported",
            where=f"EngineArgs.{name}",
            expected=expected,
            hint=MEANINGS[name][1],
        )


_SWITCHES = frozenset({"enable_prefix_caching", "enable_chunked_prefill", "disable_cascade_attn", "async_scheduling"})
_NUMBERS = frozenset(
    {"max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override"}
    | {"max_cpu_loras"}
)
_NONE = type(None)
# name -> the types that its value may have, and their description
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_SWITCHES & MEANINGS.keys(), ((bool, _NONE), "True, False or None")),
    **dict.fromkeys(("enforce_eager", "trust_remote_code", "enable_lora"), ((bool, _NONE), "True or False")),
    **dict.fromkeys((*_NUMBERS, "seed", "max_loras", "max_lora_rank"), ((int, _NONE), "an integer or None")),
    "model": ((str, Path), "a path or a name"),
    "revision": ((str, _NONE), "a text or None"),
    "chat_template": ((str, Path, _NONE), "a text, a path or None"),
    "override_generation_config": ((dict, _NONE), "a dict or None"),
}
_ONLY: dict[str, tuple[object, ...]] = {
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none"),
    "generation_config": ("auto", "vllm"),
    "hf_token": (None, True),
    "load_format": ("auto", "safetensors"),
    "tokenizer_mode": ("auto", "hf"),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
}


def _equal(value: object, default: object) -> bool:
    """Return whether an argument has its default. Empty texts, lists and dicts are equal to a default of None."""
    if default is None:
        return any(type(value) is type(one) and value == one for one in _EMPTY)
    return value is None or (value == default and isinstance(value, bool) == isinstance(default, bool))


def _number(text: str) -> int | float | None:
    """Read a number of a command line. "None" and "auto" are None; "32k" and "32K" are 32,000 and 32,768."""
    if text.lower() in ("none", "auto"):
        return None
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    number = float(text[:-1] if scale > 1 else text) * scale
    return int(number) if number.is_integer() and "." not in text else number


def _text_or_json(text: str) -> Any:
    """Read a JSON object or list of a command line, None for "None", or else a text."""
    if text == "None":
        return None
    return json.loads(text) if text[:1] in ("{", "[") else text
