"""How the messages of the served model are parsed."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.ir.errors import OptionError
from ingot.runtime.grammar.answer_format import format_of, grammar_with
from ingot.runtime.grammar.params import structured_outputs
from ingot.runtime.params.prompt import Prompt
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.parsed_deltas import ParsedMessage, new_call_id, new_short_call_id
from ingot.serve.http.response_formats import grammar_of
from ingot.serve.http.sampling_fields import SamplingFields
from ingot.serve.parsers.choice import chosen_parsers, reasoning_choice_of, tool_choice_of
from ingot.serve.parsers.output_grammar import message_format
from ingot.serve.parsers.output_parser import OutputFormat
from ingot.serve.parsers.tool_use import ToolUse
from ingot.serve.served_model import ServedModel

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ChatForm:
    """The formats of the model's messages, as far as the server knows them.

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

    def new_message(
        self, prompt: Prompt, use: ToolUse, *, continues: bool, with_reasoning: bool = True
    ) -> ParsedMessage:
        """Return a message that begins after a prompt.

        use              the calls that it may have
        continues        the message continues the last one of the prompt
        with_reasoning   as in `ParsedMessage`
        """
        parser = self.output.parser(use, prompt.text or "", continues=continues)
        new_id = new_short_call_id if "[TOOL_CALLS]" in self.output.marks else new_call_id
        return ParsedMessage(parser, new_id, with_reasoning=with_reasoning, several=use.several)

    def sampling(self, fields: SamplingFields, prompt: Prompt, use: ToolUse, *, continues: bool) -> SamplingFields:
        """Return the sampling fields of a message: those of its request, with special tokens in the text if the parser
        of the message reads them, and with the grammar of the whole message if a part of it has one.

        The other arguments are those of `new_message`. Raises HttpError or RequestError for a malformed grammar.
        """
        changes: dict[str, Any] = {}
        if self.needs_special and self.new_message(prompt, use, continues=continues).parses:
            changes["skip_special_tokens"] = False
        given = grammar_of(fields.response_format, fields.structured_outputs, "response_format")
        free = not use.functions and self.output.reasoning is None
        if use.forced or (given is not None and not free):
            answer = structured_outputs("structured_outputs", given)
            content = None if answer is None else format_of(answer)
            form = message_format(self.output, use, prompt.text or "", content, continues=continues)
            assert form is not None
            changes["structured_outputs"] = grammar_with(answer, form)
            changes["response_format"] = None
        return msgspec.structs.replace(fields, **changes) if changes else fields
