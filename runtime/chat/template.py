"""A model's chat templates: they turn conversations into prompts in which only the template writes control tokens."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.chat.control_tokens import ControlTokens, pattern_of
from ingot.runtime.chat.files import Template, choose, named_tokens, read_template, read_templates
from ingot.runtime.chat.messages import Message, plain, read_conversations, read_tools
from ingot.runtime.chat.renderer import Renderer, TemplateObjection
from ingot.runtime.chat.spans import content_spans, disguise
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.text.tokenizer import Tokenizer, read_json

# Fields that templates compare with constants: disguising them would change the text.
_STRUCTURAL = ("role", "type")
# A tag after the last message, if the model continues that message: the prompt ends at the tag. The space shows whether
# the template trims. A message may contain the tag too; the last one counts.
_TAG = "<ingot:continue> "


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat request.

    add_generation_prompt    end the prompt with the header of an assistant's turn
    continue_final_message   let the model continue the last message
    tools                    JSON schemas of the functions that the model may call
    variables                more variables for the template, such as {"enable_thinking": False}
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: object = None
    variables: Mapping[str, Any] | None = None


class ChatTemplate:
    """Turns conversations into prompts with a model's chat templates. Text in a message cannot become a control token.

    Control tokens are the special tokens, the begin and end tokens, and added tokens that a template contains, such as
    `<think>`. Assistant messages may contain the last kind, because a model writes such tokens around its reasoning and
    tool calls.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, renderer: Renderer, file: Path | None = None) -> None:
        """Read the templates in `folder`, or instead the one in `file`, a Jinja template.

        Raises RequestError if `folder` has none, ArtifactError if one is malformed or `file` cannot be read.
        """
        config = read_json(folder / "tokenizer_config.json")
        self._templates = read_templates(folder, config) if file is None else read_template(file)
        self._renderer = renderer
        self._variables = named_tokens(folder, config)
        sources = "\n".join(template.source for template in self._templates.values())
        added = tokenizer.added_tokens
        firm = tokenizer.special_ids | tokenizer.eos_token_ids | {tokenizer.bos_token_id}
        spelled = {token_id for token_id, text in added.items() if text in sources and _is_mark(text)}
        self._control = ControlTokens(
            tokenizer.backend, {text: token_id for token_id, text in added.items() if token_id in firm | spelled}
        )
        self._firm = ControlTokens(
            tokenizer.backend, {text: token_id for token_id, text in added.items() if token_id in firm}
        )
        self._kept = {control: _kept(added.values(), control) for control in (self._control, self._firm)}

    def prompts(self, messages: object, options: ChatOptions) -> list[Prompt]:
        """Return a prompt for each conversation. `messages` is one conversation or a list of them. Raises RequestError
        for a bad conversation or option, or if the template refuses a conversation."""
        tools = read_tools(options.tools)
        context = {**self._variables, **self._read_variables(options), "tools": tools}
        conversations = read_conversations(messages)
        return [self._prompt(conversation, context, options) for conversation in conversations]

    def _read_variables(self, options: ChatOptions) -> dict[str, Any]:
        if options.add_generation_prompt and options.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message together",
                expected="one of them: a new turn of the assistant, or the last message continued",
            )
        given = {} if options.variables is None else options.variables
        if not isinstance(given, Mapping):
            raise RequestError(f"{given!r:.80} is no object", where="chat_template_kwargs", expected="names and values")
        reserved = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
        for name in reserved:
            if name in given:
                raise RequestError(
                    f"'{name}' among the template's variables",
                    where="chat_template_kwargs",
                    expected="the template of the artifact" if name == "chat_template" else f"the argument {name}",
                )
        variables: dict[str, Any] = plain(given, "chat_template_kwargs")
        self._refuse_control(variables, "chat_template_kwargs", everything=True)
        return {**variables, "add_generation_prompt": bool(options.add_generation_prompt)}

    def _prompt(self, conversation: list[Message], context: Mapping[str, Any], options: ChatOptions) -> Prompt:
        template = choose(self._templates, has_tools=context["tools"] is not None)
        disguised = [
            self._disguised(message, self._kept[self._control_of(message)], f"messages[{index}]")
            for index, message in enumerate(conversation)
        ]
        pair = [conversation, disguised]
        if options.continue_final_message:
            pair = [[*messages[:-1], _tagged(messages[-1])] for messages in pair]
        tools = None
        if context["tools"] is not None:
            tools = [
                self._disguised(tool, self._kept[self._control], f"tools[{index}]")
                for index, tool in enumerate(context["tools"])
            ]
        contexts = [{**context, "messages": pair[0]}, {**context, "messages": pair[1], "tools": tools}]
        text, *others = self._render(template, contexts)
        if options.continue_final_message:
            text, *others = (_cut(rendered, template.name) for rendered in (text, *others))
        other = others[0] if others else None
        spans = None if other is None else content_spans(text, other)
        if spans is None:
            self._refuse_unless_harmless(conversation, context["tools"], text, other, template.name)
            spans = []
        _check_unicode(text)
        return Prompt(text, self._control.encode(text, spans))

    def _render(self, template: Template, contexts: list[dict[str, Any]]) -> list[str]:
        """Render the template once for each of two contexts, and return both texts. The first context has the messages.
        The second has the messages with characters replaced by `disguise`. If the template refuses these, return only
        the first text."""
        try:
            return self._renderer.render(template.name, template.source, contexts)
        except TemplateObjection:
            return self._renderer.render(template.name, template.source, contexts[:1])

    def _control_of(self, message: Message) -> ControlTokens:
        return self._firm if message["role"] == "assistant" else self._control

    def _disguised(self, value: Any, keep: re.Pattern[str], where: str) -> Any:
        """Return JSON data, such as a message, with the characters of its texts replaced by private-use characters.
        These characters show in a rendered chat which text comes from a message.

        keep    text that matches this pattern is not replaced
        where   names the data in errors

        Keys, and fields such as "role" that templates compare, stay as they are. Raises RequestError if one of these
        contains a control token.
        """
        if isinstance(value, str):
            return disguise(value, keep)
        if isinstance(value, list):
            return [self._disguised(item, keep, where) for item in value]
        if isinstance(value, dict):
            for name, item in value.items():
                self._refuse_control([name, item] if name in _STRUCTURAL else [name], where, everything=True)
            return {
                name: item if name in _STRUCTURAL and isinstance(item, str) else self._disguised(item, keep, where)
                for name, item in value.items()
            }
        return value

    def _refuse_unless_harmless(
        self, conversation: list[Message], tools: object, text: str, other: str | None, name: str
    ) -> None:
        """Raise RequestError if a message contains the text of a control token, or makes the template write a control
        token.

        This is for chats in which the text of messages cannot be located. Control tokens of messages cannot be
        distinguished there from the template's.

        text    the rendered chat
        other   the chat rendered from messages with characters replaced by `disguise`; None if the template refused
                these
        name    the template's name, for the error
        """
        hint = f"remove it: the template ({name}) changes messages, so that they cannot be found in the prompt"
        for index, message in enumerate(conversation):
            self._refuse_control(message, f"messages[{index}]", control=self._control_of(message), hint=hint)
        self._refuse_control(tools, "tools", hint=hint)
        # Reasoning marks are excluded: templates write them for a word in a message, such as "/no_think".
        found = self._firm.pattern.findall
        if other is not None and (brought := Counter(found(text)) - Counter(found(other))):
            raise RequestError(f"a message causes the control token {next(iter(brought))}", where="messages", hint=hint)

    def _refuse_control(
        self,
        value: object,
        where: str,
        *,
        control: ControlTokens | None = None,
        everything: bool = False,
        hint: str = "",
    ) -> None:
        """Raise RequestError if a text in `value` contains a control token. `value` is JSON data.

        where        names the data in the error
        control      the control tokens to look for; None: all of the model's
        everything   also look in the keys of objects
        hint         what the caller can do, for the error
        """
        if isinstance(value, str):
            if token := (control or self._control).holds(value):
                raise RequestError(
                    f"the text of the control token {token}", where=where, expected="none there", hint=hint
                )
            return
        items: list[tuple[str, object]] = []
        if isinstance(value, list):
            items = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            items = [(f"{where}.{key}", item) for key, item in value.items()]
            if everything:
                items += [(where, key) for key in value]
        for place, item in items:
            self._refuse_control(item, place, control=control, everything=everything, hint=hint)


def _is_mark(token: str) -> bool:
    """Return whether an added token is a mark such as `<think>`. A token of only letters, digits, underscores and white
    space is no mark: templates may contain it as ordinary text."""
    return not re.fullmatch(r"[\w\s]*", token)


def _kept(added: Iterable[str], control: ControlTokens) -> re.Pattern[str]:
    """Return a pattern of added tokens that `disguise` must not replace in messages, because templates search for them.
    An example is `</think>`.

    The pattern leaves out the tokens of `control`, and tokens that contain or overlap one of them.
    """
    joined = "\0".join(control.tokens)
    begins = {text[:size] for text in control.tokens for size in range(1, len(text))}
    ends = {text[-size:] for text in control.tokens for size in range(1, len(text))}

    def touches(token: str) -> bool:
        meets = any(token[-size:] in begins or token[:size] in ends for size in range(1, len(token)))
        return meets or token in joined or control.pattern.search(token) is not None

    return pattern_of(token for token in added if _is_mark(token) and not touches(token))


def _tagged(message: Message) -> Message:
    if "content" not in message:
        raise RequestError("the last message has no content to continue", where="messages")
    return {**message, "content": message["content"] + _TAG}


def _cut(text: str, name: str) -> str:
    """Return a rendered chat up to the end of its last message, so that the model continues that message. `_tagged` has
    put a tag at that end.

    If the template trimmed the message, trim the result too. Raises RequestError if the tag is missing. `name` is the
    template's name, for the error.
    """
    begin = text.rfind(_TAG.strip())
    if begin < 0:
        raise RequestError(
            "the last message cannot be continued: the template drops or changes its end",
            where=name,
            expected="a last message that the template writes unchanged",
        )
    kept = text[:begin]
    return kept if text.startswith(_TAG, begin) else kept.rstrip()


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the messages are no valid Unicode text", where="messages") from None
