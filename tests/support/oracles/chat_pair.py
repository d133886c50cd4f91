"""A chat model's tokenizer folder as Ingot and as transformers read it, and conversations to give both."""

import dataclasses
from typing import Any

from chat_models import CHAT_MODELS, ChatModel

from ingot.runtime.chat.template import ChatOptions, ChatTemplate
from ingot.runtime.text.tokenizer import Tokenizer

CLOSED = ChatOptions(add_generation_prompt=False)
OPEN = ChatOptions(add_generation_prompt=False, continue_final_message=True)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "é" or\nso.',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclasses.dataclass(frozen=True)
class Both:
    """Ingot and transformers on one tokenizer folder."""

    model: ChatModel
    chat: ChatTemplate
    tokenizer: Tokenizer
    theirs: Any

    def ids(self, messages: Any, options: ChatOptions = CLOSED) -> list[int]:
        return self.prompt(messages, options).token_ids

    def prompt(self, messages: Any, options: ChatOptions = CLOSED) -> Any:
        (made,) = self.chat.prompts(messages, options)
        return made

    def controls(self, ids: list[int]) -> list[str]:
        """The control tokens among them, in order."""
        known = {self.tokenizer.backend.token_to_id(text): text for text in self.model.control}
        return [known[token] for token in ids if token in known]

    def check_equal(self, messages: Any, options: ChatOptions = CLOSED) -> None:
        said = {
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
            "tools": options.tools,
            **(options.variables or {}),
        }
        made = self.prompt(messages, options)
        assert made.text == self.theirs.apply_chat_template(messages, tokenize=False, **said)
        assert made.token_ids == self.theirs.apply_chat_template(messages, return_dict=False, **said)


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]


def changing(template: str) -> ChatModel:
    turn = f"{{% for m in messages %}}<|im_start|>{template}<|im_end|>\n{{% endfor %}}"
    return dataclasses.replace(CHAT_MODELS["chatml"], template=turn)
