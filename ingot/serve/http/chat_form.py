"""How the messages of the served model are parsed."""

import re
from dataclasses import dataclass

from ingot.ir.errors import OptionError
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.parsed_deltas import new_call_id, new_short_call_id
from ingot.serve.parsers.choice import chosen_parsers, reasoning_choice_of, tool_choice_of
from ingot.serve.parsers.events import Parser
from ingot.serve.parsers.machine import Tools
from ingot.serve.parsers.output_parser import OutputFormat
from ingot.serve.served_model import ServedModel

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ChatForm:
    """What the server knows of the model's messages.

    output          their formats
    reads_tools     the chat template writes tools into prompts
    needs_special   a format has special tokens, so detokenizing must keep these
    """

    output: OutputFormat
    reads_tools: bool
    needs_special: bool

    @classmethod
    def of(cls, model: ServedModel, options: HttpOptions) -> "ChatForm":
        """Return the form of a model's messages: as the options say, or as the chat template shows.

        Raises OptionError for an unknown parser, or if parsers do not fit together.
        """
        template = model.template_text
        names = chosen_parsers(options.tool_call_parser, options.reasoning_parser, template)
        output = OutputFormat(
            None if names.tools is None else tool_choice_of(names.tools),
            None if names.reasoning is None else reasoning_choice_of(names.reasoning),
        )
        if output.is_harmony and not {output.tools, output.reasoning} <= {"harmony", None}:
            raise OptionError(
                f"the parsers {names.tools} and {names.reasoning} do not fit together",
                expected="openai with openai_gptoss, or both others",
            )
        tokenizer = model.tokenizer
        special = [] if tokenizer is None else [tokenizer.added_tokens[one] for one in tokenizer.special_ids]
        needs_special = any(token in mark for token in special for mark in output.marks)
        return cls(output, _TOOLS.search(template) is not None, needs_special)

    def new_call_id(self) -> str:
        """Return the id of a call to which the model gives none."""
        return new_short_call_id() if "[TOOL_CALLS]" in self.output.marks else new_call_id()

    def parser(self, tools: Tools, prompt: str | None, *, continues: bool) -> Parser | None:
        """Return a parser for one message, as `OutputFormat.parser`."""
        return self.output.parser(tools, prompt or "", continues=continues)
