"""The formats of reasoning, by the names of vLLM's `--reasoning-parser`."""

from typing import Literal

from ingot.serve.parsers.reasoning import ReasoningForm

_THINK = (("<think>",), ("</think>",))
# The model writes the begin marker, or its prompt ends with it.
_WRITES_BEGIN = ReasoningForm(*_THINK, until_calls=True)
# The model may also begin to reason without a marker.
_BEGUN = ReasoningForm(*_THINK, begun=True, until_calls=True)

REASONING_FORMATS: dict[str, ReasoningForm | Literal["harmony"]] = {
    "deepseek_r1": ReasoningForm(*_THINK, begun=True),
    "deepseek_v3": ReasoningForm(*_THINK),
    "ernie45": ReasoningForm(*_THINK, begun=True, answer=("<response>", "</response>")),
    "glm45": _WRITES_BEGIN,
    "granite": ReasoningForm(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        answer=("<response>", "</response>"),
    ),
    "holo2": ReasoningForm(*_THINK, begun=True),
    "hunyuan_a13b": ReasoningForm(*_THINK, answer=("<answer>", "</answer>"), before_answer="助手："),
    "kimi_k2": _BEGUN,
    "minimax_m2": _BEGUN,
    "mistral": ReasoningForm(("[THINK]",), ("[/THINK]",), anywhere=True),
    "nemotron": _WRITES_BEGIN,
    "olmo3": ReasoningForm(*_THINK, begun=True),
    "openai_gptoss": "harmony",
    "qwen3": _WRITES_BEGIN,
    "seed_oss": ReasoningForm(("<seed:think>",), ("</seed:think>",), begun=True, until_calls=True),
    "step3": ReasoningForm(*_THINK, begun=True),
}

# Other names of vLLM, for formats of the table.
REASONING_ALIASES = {
    "glm47": "glm45",
    "mimo": "qwen3",
    "nemotron_v3": "nemotron",
    "step3p5": "step3",
}
