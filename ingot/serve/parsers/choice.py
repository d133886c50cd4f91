"""Which parsers a model has: by name, by the markers in its chat template, or from another package."""

import difflib
from dataclasses import dataclass

from ingot.ir.errors import OptionError
from ingot.ir.plugins import REASONING_PARSERS_GROUP, TOOL_PARSERS_GROUP, load_user_parser, user_parser_names
from ingot.serve.parsers.output_parser import PluggedIn, ReasoningChoice, ToolChoice
from ingot.serve.parsers.reasoning_formats import REASONING_ALIASES, REASONING_FORMATS
from ingot.serve.parsers.tool_formats import TOOL_ALIASES, TOOL_FORMATS

AUTO, NONE = "auto", "none"

# Formats, and texts that are all in the chat templates of their models. The first row that fits counts, so rows with
# rarer texts come first. Formats without such texts (pythonic, xlam, glm4, …) need the option.
_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("step3", ("<steptml:invoke",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gigachat3", ("<|function_call|>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("olmo3", ("<function_calls>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("phi4mini_json", ("functools[",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
)
_REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<think>", "<response>", "</response>")),
    ("hunyuan_a13b", ("<think>", "<answer>")),
    ("qwen3", ("</think>",)),
)


@dataclass(frozen=True)
class ParserNames:
    """The parsers of a model. None: it has none.

    tools, reasoning   names of vLLM, or of other packages
    """

    tools: str | None
    reasoning: str | None


def chosen_parsers(tools: str, reasoning: str, template: str) -> ParserNames:
    """Return the parsers that options name. "auto" chooses by the text of the chat template, "none" is none.

    Raises OptionError for an unknown name."""
    return ParserNames(
        _chosen("--tool-call-parser", tools, template, _TOOL_MARKS),
        _chosen("--reasoning-parser", reasoning, template, _REASONING_MARKS),
    )


def tool_parser_names() -> list[str]:
    """Return all names for `--tool-call-parser`, sorted."""
    return sorted({*TOOL_FORMATS, *TOOL_ALIASES, *user_parser_names(TOOL_PARSERS_GROUP)})


def reasoning_parser_names() -> list[str]:
    """Return all names for `--reasoning-parser`, sorted."""
    return sorted({*REASONING_FORMATS, *REASONING_ALIASES, *user_parser_names(REASONING_PARSERS_GROUP)})


def tool_choice_of(name: str) -> ToolChoice:
    """Return the format of tool calls with this name, or the parser of another package. Raises OptionError if there is
    none, or if the package does not load."""
    form = TOOL_FORMATS.get(TOOL_ALIASES.get(name, name))
    return _plugged_in(TOOL_PARSERS_GROUP, name) if form is None else form


def reasoning_choice_of(name: str) -> ReasoningChoice:
    """Return the format of reasoning with this name, or the parser of another package. Raises OptionError as
    `tool_choice_of`."""
    form = REASONING_FORMATS.get(REASONING_ALIASES.get(name, name))
    return _plugged_in(REASONING_PARSERS_GROUP, name) if form is None else form


def _chosen(option: str, name: str, template: str, table: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    if name == AUTO:
        return next((one for one, texts in table if all(text in template for text in texts)), None)
    if name == NONE:
        return None
    names = tool_parser_names() if table is _TOOL_MARKS else reasoning_parser_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, 5)
        raise OptionError(
            f"{option} is {name!r:.80}",
            expected=", ".join((AUTO, NONE, *names)),
            hint=f"close names: {', '.join(close)}" if close else "",
        )
    return name


def _plugged_in(group: str, name: str) -> PluggedIn:
    found = load_user_parser(group, name)
    if not callable(found):
        raise OptionError(f"'{name}' of '{group}' is no parser", expected="a function that returns a parser")
    return PluggedIn(found)
