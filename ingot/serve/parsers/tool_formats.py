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
from ingot.serve.parsers.written_calls import LISTED, NAME, NUMBER, OBJECT, WrittenCalls, listed, objects
from ingot.serve.parsers.written_tags import WrittenTags

# "harmony": the whole message is in the format of gpt-oss, its reasoning too.
ToolForm = JsonForm | NamedForm | TaggedForm | PythonicForm | Literal["harmony"]

_TOOL_CALL = (objects("<tool_call>\n", "\n</tool_call>", "\n"),)
_HERMES = JsonForm(("<tool_call>",), ("</tool_call>",), written=_TOOL_CALL)
_LLAMA = JsonForm(("<|python_tag|>",), bare="{", written=(objects("", "", "; ", "parameters"),))


def _tool_calls(written: WrittenCalls) -> JsonForm:
    return JsonForm(("<tool_calls>",), ("</tool_calls>",), written=(written,))


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _deepseek(begin: str, end: str, between: str) -> tuple[WrittenCalls, ...]:
    return (WrittenCalls(_DEEPSEEK[0] + begin, end + _DEEPSEEK[2], between, *_DEEPSEEK_SECTION),)


def _qwen(begin: str, end: str) -> TaggedForm:
    return TaggedForm(
        call=("<function=", "</function>"),
        name_end=">",
        parameter=("<parameter=", "</parameter>"),
        key_ends={">": None},
        section=(begin, end),
        lines=True,
        written=WrittenTags(
            f"{begin}\n<function={NAME}>\n",
            f"<parameter={NAME}>\n",
            "</parameter>",
            f"</function>\n{end}",
            gap="\n",
            between="\n",
        ),
    )


def _dsml(section: str) -> TaggedForm:
    """DeepSeek's markup. Each argument says whether it is a string or JSON."""
    return TaggedForm(
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        name_end='">',
        parameter=('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
        key_ends={'" string="true">': STRING, '" string="false">': ANY, '">': None},
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        written=WrittenTags(
            f'<｜DSML｜invoke name="{NAME}">\n',
            f'<｜DSML｜parameter name="{NAME}" string="true">',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>\n",
            json_key=f'<｜DSML｜parameter name="{NAME}" string="false">',
            before=f"<｜DSML｜{section}>\n",
            after=f"</｜DSML｜{section}>",
        ),
    )


_QWEN = _qwen("<tool_call>", "</tool_call>")


def _glm(newline: str) -> TaggedForm:
    """GLM's tags. GLM 4.5 writes them on lines of their own."""
    return TaggedForm(
        call=("<tool_call>", "</tool_call>"),
        name_end="\n",
        parameter=("<arg_key>", "</arg_value>"),
        key_ends={"</arg_key>": None},
        value_begin="<arg_value>",
        written=WrittenTags(
            f"<tool_call>{NAME}{newline}",
            f"<arg_key>{NAME}</arg_key>{newline}<arg_value>",
            "</arg_value>",
            "</tool_call>",
            after_value=newline,
            between=newline,
        ),
    )


TOOL_FORMATS: dict[str, ToolForm] = {
    "deepseek_v3": NamedForm(
        _DEEPSEEK[0],
        ("```json",),
        ("```", _DEEPSEEK[2]),
        _DEEPSEEK_SECTION,
        header=deepseek_header,
        written=_deepseek(f"function{_DEEPSEEK[1]}{NAME}\n```json\n", "\n```", "\n"),
    ),
    "deepseek_v31": NamedForm(
        _DEEPSEEK[0],
        (_DEEPSEEK[1],),
        (_DEEPSEEK[2],),
        _DEEPSEEK_SECTION,
        written=_deepseek(f"{NAME}{_DEEPSEEK[1]}", "", ""),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "ernie45": JsonForm(("<tool_call>",), ("</tool_call>",), need_arguments=False, written=_TOOL_CALL),
    "functiongemma": NamedForm(
        "<start_function_call>call:", ("{",), ("<end_function_call>",), notation=gemma("<escape>")
    ),
    "gemma4": NamedForm("<|tool_call>call:", ("{",), ("<tool_call|>",), notation=gemma('<|"|>')),
    "gigachat3": JsonForm(
        ("<|function_call|>", "<|message_sep|>", "function call<|role_sep|>"),
        words=("function call<|role_sep|>",),
        written=(objects("function call<|role_sep|>\n", "", None),),
    ),
    "glm4": NamedForm("", ("\n",), written=(WrittenCalls(f"{NAME}\n", ""),)),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "granite": JsonForm(("<|tool_call|>", "<tool_call>"), bare="[", written=(listed("<|tool_call|>"),)),
    "granite-20b-fc": JsonForm(("<function_call>",), written=(objects("<function_call> ", "", " "),)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _tool_calls(listed("<tool_calls>", "</tool_calls>")),
    "internlm": JsonForm(
        ("<|action_start|>",),
        ("<|action_end|>",),
        words=("<|plugin|>",),
        need_arguments=False,
        written=(objects("<|action_start|><|plugin|>\n", "<|action_end|>", "", "parameters"),),
    ),
    "jamba": _tool_calls(listed("<tool_calls>\n", "\n</tool_calls>", ",\n")),
    "kimi_k2": NamedForm(
        "<|tool_call_begin|>",
        ("<|tool_call_argument_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        header=kimi_header,
        written=(
            WrittenCalls(
                f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "",
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
            ),
        ),
    ),
    "lfm2": PythonicForm(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": PythonicForm(("<|python_start|>",), ("<|python_end|>",), bare=True),
    "longcat": JsonForm(
        ("<longcat_tool_call>",),
        ("</longcat_tool_call>",),
        written=(objects("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),),
    ),
    "mimo": _QWEN,
    "minimax": _tool_calls(WrittenCalls(OBJECT, "}\n", "", "<tool_calls>\n", "</tool_calls>")),
    "minimax_m2": TaggedForm(
        call=('<invoke name="', "</invoke>"),
        name_end='">',
        parameter=('<parameter name="', "</parameter>"),
        key_ends={'">': None},
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        written=WrittenTags(
            f'<invoke name="{NAME}">\n',
            f'<parameter name="{NAME}">',
            "</parameter>",
            "</invoke>\n",
            before="<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
    ),
    "mistral": NamedForm(
        "[TOOL_CALLS]",
        ("[ARGS]", "{"),
        header=mistral_header,
        objects=JsonForm(("[TOOL_CALLS]",)),
        written=(  # that of newer models, and two of older ones
            WrittenCalls(f"[TOOL_CALLS]{NAME}[ARGS]", "", ""),
            listed("[TOOL_CALLS] "),
            listed("[TOOL_CALLS]"),
        ),
    ),
    "olmo3": PythonicForm(("<function_calls>",), ("</function_calls>",), listed=False),
    "openai": "harmony",
    "phi4mini_json": JsonForm(("functools",), written=(listed("functools"),)),
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
        written=WrittenTags(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">\n',
            f'<steptml:parameter name="{NAME}">',
            "</steptml:parameter>",
            "</steptml:invoke><｜tool_call_end｜>\n",
            before="<｜tool_calls_begin｜>\n",
            after="<｜tool_calls_end｜>",
        ),
    ),
    "step3p5": _QWEN,
    "xlam": JsonForm(
        ("```", "[TOOL_CALLS]", "<tool_call>"), ("```", "</tool_call>"), words=("json",), bare="[", written=(LISTED,)
    ),
}

# Other names of vLLM, and of older versions of it.
TOOL_ALIASES = {
    "glm4_moe": "glm45",
    "internlm2": "internlm",
    "phi4_mini_json": "phi4mini_json",
}
