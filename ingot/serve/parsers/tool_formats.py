"""The formats of tool calls, by the names of vLLM's `--tool-call-parser`.

The texts are those that the models' chat templates and model cards show.
"""

from typing import Literal

from ingot.serve.parsers.json_calls import JsonForm
from ingot.serve.parsers.named_calls import NamedForm
from ingot.serve.parsers.names import deepseek_header, kimi_header, mistral_header
from ingot.serve.parsers.pythonic_calls import PythonicForm
from ingot.serve.parsers.schema_types import ANY, STRING
from ingot.serve.parsers.tagged_calls import TaggedForm
from ingot.serve.parsers.values import gemma

# "harmony": the whole message is in the format of gpt-oss, its reasoning too.
ToolForm = JsonForm | NamedForm | TaggedForm | PythonicForm | Literal["harmony"]

_HERMES = JsonForm(("<tool_call>",), ("</tool_call>",))
_LLAMA = JsonForm(("<|python_tag|>",), bare="{")
_TOOL_CALLS = JsonForm(("<tool_calls>",), ("</tool_calls>",))
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _qwen(begin: str, end: str) -> TaggedForm:
    return TaggedForm(
        call=("<function=", "</function>"),
        name_end=">",
        parameter=("<parameter=", "</parameter>"),
        key_ends={">": None},
        section=(begin, end),
        lines=True,
    )


def _dsml(section: str) -> TaggedForm:
    """DeepSeek's markup. Each argument says whether it is a string or JSON."""
    return TaggedForm(
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        name_end='">',
        parameter=('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
        key_ends={'" string="true">': STRING, '" string="false">': ANY, '">': None},
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
    )


_QWEN = _qwen("<tool_call>", "</tool_call>")
_GLM = TaggedForm(
    call=("<tool_call>", "</tool_call>"),
    name_end="\n",
    parameter=("<arg_key>", "</arg_value>"),
    key_ends={"</arg_key>": None},
    value_begin="<arg_value>",
)

TOOL_FORMATS: dict[str, ToolForm] = {
    "deepseek_v3": NamedForm(
        _DEEPSEEK[0], ("```json",), ("```", _DEEPSEEK[2]), _DEEPSEEK_SECTION, header=deepseek_header
    ),
    "deepseek_v31": NamedForm(_DEEPSEEK[0], (_DEEPSEEK[1],), (_DEEPSEEK[2],), _DEEPSEEK_SECTION),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "ernie45": JsonForm(("<tool_call>",), ("</tool_call>",), need_arguments=False),
    "functiongemma": NamedForm(
        "<start_function_call>call:", ("{",), ("<end_function_call>",), notation=gemma("<escape>")
    ),
    "gemma4": NamedForm("<|tool_call>call:", ("{",), ("<tool_call|>",), notation=gemma('<|"|>')),
    "gigachat3": JsonForm(
        ("<|function_call|>", "<|message_sep|>", "function call<|role_sep|>"), words=("function call<|role_sep|>",)
    ),
    "glm4": NamedForm("", ("\n",)),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": JsonForm(("<|tool_call|>", "<tool_call>"), bare="["),
    "granite-20b-fc": JsonForm(("<function_call>",)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _TOOL_CALLS,
    "internlm": JsonForm(("<|action_start|>",), ("<|action_end|>",), words=("<|plugin|>",), need_arguments=False),
    "jamba": _TOOL_CALLS,
    "kimi_k2": NamedForm(
        "<|tool_call_begin|>",
        ("<|tool_call_argument_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        header=kimi_header,
    ),
    "lfm2": PythonicForm(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": PythonicForm(("<|python_start|>",), ("<|python_end|>",), bare=True),
    "longcat": JsonForm(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
    "mimo": _QWEN,
    "minimax": _TOOL_CALLS,
    "minimax_m2": TaggedForm(
        call=('<invoke name="', "</invoke>"),
        name_end='">',
        parameter=('<parameter name="', "</parameter>"),
        key_ends={'">': None},
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "mistral": NamedForm("[TOOL_CALLS]", ("[ARGS]", "{"), header=mistral_header, objects=JsonForm(("[TOOL_CALLS]",))),
    "olmo3": PythonicForm(("<function_calls>",), ("</function_calls>",), listed=False),
    "openai": "harmony",
    "phi4mini_json": JsonForm(("functools",)),
    "pythonic": PythonicForm(bare=True),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
    "step3": TaggedForm(
        call=('<steptml:invoke name="', "</steptml:invoke>"),
        name_end='">',
        parameter=('<steptml:parameter name="', "</steptml:parameter>"),
        key_ends={'">': None},
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        lead=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
        tail=("<｜tool_call_end｜>",),
    ),
    "step3p5": _QWEN,
    "xlam": JsonForm(("```", "[TOOL_CALLS]", "<tool_call>"), ("```", "</tool_call>"), words=("json",), bare="["),
}

# Other names of vLLM, and of older versions of it.
TOOL_ALIASES = {
    "glm4_moe": "glm45",
    "internlm2": "internlm",
    "phi4_mini_json": "phi4mini_json",
}
