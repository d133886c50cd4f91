"""Messages written in the formats of models, as their chat templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from random_messages import Message

Renderer = Callable[[Message], str]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_object(call: tuple[str, dict[str, Any]], arguments: str = "arguments") -> str:
    return dumps({"name": call[0], arguments: call[1]})


def objects(begin: str, end: str, separator: str = "\n", arguments: str = "arguments") -> Renderer:
    """Each call as an object between markers."""

    def render(message: Message) -> str:
        calls = separator.join(f"{begin}{call_object(call, arguments)}{end}" for call in message.calls)
        return message.content + ("\n" if message.content and calls else "") + calls

    return render


def listed(begin: str, end: str = "", separator: str = ", ") -> Renderer:
    """All calls as one list."""

    def render(message: Message) -> str:
        calls = separator.join(map(call_object, message.calls))
        return message.content + (f"{begin}[{calls}]{end}" if calls else "")

    return render


def around(begin: str, one: Callable[[int, str, dict[str, Any]], str], end: str, separator: str = "") -> Renderer:
    """The calls as `one` writes them, between markers."""

    def render(message: Message) -> str:
        calls = separator.join(one(index, *call) for index, call in enumerate(message.calls))
        return message.content + (begin + calls + end if calls else "")

    return render


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen(prefix: str) -> Renderer:
    def one(_index: int, name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"\n<{prefix}tool_call>\n<function={name}>\n{values}</function>\n</{prefix}tool_call>"

    return around("", one, "")


def invoke(begin: str, prefix: str, end: str, tail: tuple[str, str] = ("", "")) -> Renderer:
    def one(_index: int, name: str, arguments: dict[str, Any]) -> str:
        values = "\n".join(
            f'<{prefix}parameter name="{key}">{as_text(value)}</{prefix}parameter>' for key, value in arguments.items()
        )
        return f'{tail[0]}<{prefix}invoke name="{name}">\n{values}\n</{prefix}invoke>{tail[1]}\n'

    return around(begin, one, end)


def dsml(section: str) -> Renderer:
    def one(_index: int, name: str, arguments: dict[str, Any]) -> str:
        values = "\n".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{as_text(value)}'
            "</｜DSML｜parameter>"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}\n</｜DSML｜invoke>\n'

    return around(f"\n\n<｜DSML｜{section}>\n", one, f"</｜DSML｜{section}>")


def glm(newline: str) -> Renderer:
    def one(_index: int, name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>{newline}<arg_value>{as_text(value)}</arg_value>{newline}"
            for key, value in arguments.items()
        )
        return f"{newline}<tool_call>{name}{newline}{values}</tool_call>"

    return around("", one, "")


def pythonic(_index: int, name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(gemma(one, quote) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one, quote)}" for key, one in value.items()) + "}"
    return dumps(value)


def gemma_calls(begin: str, end: str, quote: str) -> Renderer:
    return around("", lambda _index, name, arguments: f"{begin}call:{name}{gemma(arguments, quote)}{end}", "")


def harmony(message: Message) -> str:
    parts = []
    if message.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{message.reasoning}<|end|>")
    if message.content:
        parts.append(f"<|channel|>final<|message|>{message.content}<|end|>")
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in message.calls
    ]
    return "<|start|>assistant".join(parts)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
TOOLS: dict[str, Renderer] = {
    "deepseek_v3": around(
        _DEEPSEEK[0],
        lambda _index, name, arguments: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        ),
        _DEEPSEEK[1],
        "\n",
    ),
    "deepseek_v31": around(
        _DEEPSEEK[0],
        lambda _index, name, arguments: (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        ),
        _DEEPSEEK[1],
    ),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "ernie45": objects("<tool_call>\n", "\n</tool_call>\n"),
    "functiongemma": gemma_calls("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": objects("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
    "glm4": around("", lambda _index, name, arguments: f"\n{name}\n{dumps(arguments)}", ""),
    "glm45": glm("\n"),
    "glm47": glm(""),
    "granite": listed("<|tool_call|>"),
    "granite-20b-fc": objects("<function_call> ", "", " "),
    "granite4": objects("<tool_call>\n", "\n</tool_call>"),
    "hermes": objects("<tool_call>\n", "\n</tool_call>"),
    "hunyuan_a13b": listed("\n<tool_calls>", "</tool_calls>"),
    "internlm": objects("<|action_start|><|plugin|>\n", "<|action_end|>\n", "", "parameters"),
    "jamba": listed("<tool_calls>\n", "\n</tool_calls>", ",\n"),
    "kimi_k2": around(
        "<|tool_calls_section_begin|>",
        lambda index, name, arguments: (
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        ),
        "<|tool_calls_section_end|>",
    ),
    "lfm2": around("<|tool_call_start|>[", pythonic, "]<|tool_call_end|>", ", "),
    "llama3_json": objects("", "", "; ", "parameters"),
    "llama4_json": around(
        "<|python_tag|>", lambda _index, name, arguments: call_object((name, arguments), "parameters"), "", "; "
    ),
    "llama4_pythonic": around("<|python_start|>[", pythonic, "]<|python_end|>", ", "),
    "longcat": objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "minimax": around(
        "<tool_calls>\n", lambda _index, name, arguments: f"{call_object((name, arguments))}\n", "</tool_calls>"
    ),
    "minimax_m2": invoke("\n<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "mistral": around("", lambda _index, name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}", ""),
    "olmo3": around("<function_calls>", pythonic, "</function_calls>", "\n"),
    "openai": harmony,
    "phi4mini_json": listed("functools"),
    "pythonic": around("[", pythonic, "]", ", "),
    "qwen3_coder": qwen(""),
    "seed_oss": qwen("seed:"),
    "step3": invoke(
        "<｜tool_calls_begin｜>\n",
        "steptml:",
        "<｜tool_calls_end｜>",
        ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
    "xlam": listed("```json\n", "\n```"),
}
# The calls of these formats begin the message, so it has no content.
WITHOUT_CONTENT = ("glm4", "llama3_json", "pythonic")

REASONING: dict[str, tuple[str, str]] = {
    "deepseek_r1": ("", "\n</think>\n\n"),
    "deepseek_v3": ("<think>", "</think>"),
    "ernie45": ("", "\n</think>\n\n"),
    "glm45": ("\n<think>", "</think>\n"),
    "granite": ("Here is my thought process:\n", "\nHere is my response:\n"),
    "holo2": ("<think>\n", "\n</think>\n\n"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n"),
    "kimi_k2": ("<think>", "</think>"),
    "minimax_m2": ("", "\n</think>\n\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "nemotron": ("<think>\n", "\n</think>\n\n"),
    "olmo3": ("<think>", "</think>"),
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "step3": ("", "\n</think>\n"),
}


def rendered(message: Message, tools: str | None, reasoning: str | None, *, begun: bool = False) -> str:
    """Write a message in the formats of a parser of tools and of reasoning. `begun`: also mark empty reasoning."""
    text = message.content if tools is None else TOOLS[tools](message)
    if reasoning is None or (not message.reasoning and not begun):
        return text
    begin, end = REASONING[reasoning]
    return begin + message.reasoning + end + text
