"""The grammar of a message: reasoning first, then calls that a request forces, or an answer with a grammar of its own.

Grammars are formats of structural tags (`ingot.runtime.grammar.structural_tag`). They begin where the reasoning ends,
so a model reasons as it does without a grammar.
"""

from dataclasses import replace

from ingot.ir.errors import RequestError
from ingot.serve.parsers.json_calls import JsonForm
from ingot.serve.parsers.named_calls import NamedForm
from ingot.serve.parsers.output_parser import OutputFormat, PluggedIn
from ingot.serve.parsers.pythonic_calls import PythonicForm
from ingot.serve.parsers.reasoning import ReasoningForm
from ingot.serve.parsers.tool_use import Tools, ToolUse
from ingot.serve.parsers.written_calls import (
    LISTED,
    NAME,
    Format,
    WrittenCalls,
    either,
    fixed,
    pattern,
    sequence,
    tag,
)

# Models write one or two newlines after their reasoning, and parsers drop them.
_GAP = pattern(r"\n{0,4}")
# gpt-oss: a call ends with an end token of the model, and so does an answer.
_HARMONY_CALLS = WrittenCalls(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", "")
_HARMONY_ANSWER = fixed("<|channel|>final<|message|>")
_HARMONY_REASONING = tag("<|channel|>analysis<|message|>", None, "<|end|><|start|>assistant")


def message_format(
    output: OutputFormat, use: ToolUse, prompt: str, answer: Format | None, *, continues: bool = False
) -> Format | None:
    """Return the format of a message; None if it is free.

    output      the formats of the model's messages
    use         the calls that it may have
    prompt      the text of the prompt
    answer      the format of an answer without calls; None: any text
    continues   the message continues the last one of the prompt

    Raises RequestError if an answer has a format and the form of calls, which may come in its place, is unknown.
    """
    if not use.forced and answer is None:
        return None
    if output.is_harmony:
        return _harmony(use, answer, continues=continues)
    choices: list[Format] = []
    if use.forced:
        choices = output.calls(use) or [LISTED.format(use.functions, several=use.several)]
    elif answer is not None:
        choices = [answer, *(_calls(output, use) if use.functions else ())]
    body = either(choices)
    if not isinstance(output.reasoning, ReasoningForm):
        return body
    return sequence(*_reasoning(output.reasoning, prompt, continues=continues), body)


def _harmony(use: ToolUse, answer: Format | None, *, continues: bool) -> Format:
    functions = use.functions if use.forced else _unchecked(use.functions)
    choices = [_HARMONY_CALLS.format(functions, several=False)] if functions else []
    if not use.forced and answer is not None:
        choices.append(answer if continues else sequence(_HARMONY_ANSWER, answer))
    messages = either(choices)
    reasoning: Format = {"type": "tags_with_separator", "separator": "", "tags": [_HARMONY_REASONING]}
    return messages if continues else sequence(reasoning, messages)


def _reasoning(form: ReasoningForm, prompt: str, *, continues: bool) -> tuple[Format, ...]:
    """Return the formats of the reasoning at the begin of a message, and of the newlines after it."""
    if form.begun_by(prompt, continues=continues):
        return either([tag("", None, end) for end in form.ends]), _GAP
    if continues:  # after its reasoning
        return ()
    marks = [(begin, end) for begin in form.begins for end in form.ends]
    return either([*(tag(begin, None, end) for begin, end in marks), fixed("")]), _GAP


def _unchecked(functions: Tools) -> Tools:
    """Return functions of the same names that take any arguments."""
    return {name: {"parameters": {"type": "object"}} for name in functions}


def _calls(output: OutputFormat, use: ToolUse) -> list[Format]:
    """Return the formats of calls that a message may have in place of an answer. As without a grammar, they need not
    follow the schemas of the tools."""
    form = output.tools
    if isinstance(form, JsonForm | NamedForm) and form.written:
        return output.calls(replace(use, functions=_unchecked(use.functions)))
    if isinstance(form, PluggedIn | str | None):
        raise RequestError(
            "a format of the answer together with tools needs a format of tool calls that the server knows",
            where="tools",
            expected="no tools, or no format of the answer",
            hint="serve the model with --tool-call-parser NAME",
        )
    begins = list(form.machine(use.functions).openings.texts)
    if isinstance(form, PythonicForm) and form.bare:
        begins += [f"[{name}(" for name in use.functions]
    return [tag(begin, None, "") for begin in begins]
