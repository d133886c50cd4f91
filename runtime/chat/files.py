"""The chat templates of a tokenizer folder, and the named tokens for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.ir.errors import ArtifactError, RequestError
from ingot.runtime.text.tokenizer import read_json

# The named tokens of tokenizer_config.json, which transformers passes to every template.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Template:
    """A chat template. `source` is its text. `name` names its file in error messages."""

    name: str
    source: str


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, Template]:
    """Return the chat templates of a tokenizer's folder: name -> template. A single template has the name "default".

    They are read from chat_template.jinja if that file exists, else from `config`, the content of
    tokenizer_config.json. Raises RequestError if there is no template, ArtifactError if one is malformed.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_template(file)
    given = config.get("chat_template")
    where = f"{folder / 'tokenizer_config.json'}, chat_template"
    if given is None:
        raise RequestError(
            "this model has no chat template",
            where=str(folder),
            expected="chat_template in tokenizer_config.json, or chat_template.jinja",
            hint="it may be a base model: complete a text instead, or serve it with --chat-template",
        )
    if isinstance(given, str):
        return {"default": Template(where, given)}
    if isinstance(given, list) and given:
        pairs = [(item.get("name"), item.get("template")) for item in given if isinstance(item, Mapping)]
        if len(pairs) == len(given) and all(isinstance(part, str) for pair in pairs for part in pair):
            return {str(name): Template(f"{where}, {name}", str(source)) for name, source in pairs}
    raise ArtifactError(
        f"chat_template is a {type(given).__name__}", where=where, expected="a text, or a list of {name, template}"
    )


def read_template(file: Path) -> dict[str, Template]:
    """Return the template of one file, named "default". Raises ArtifactError if the file cannot be read."""
    try:
        return {"default": Template(str(file), file.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the chat template cannot be read: {error}", where=str(file)) from None


def choose(templates: Mapping[str, Template], *, has_tools: bool) -> Template:
    """Return the template for a chat: "tool_use" if the chat has tools and that template exists, else "default".
    transformers chooses equally. Raises RequestError if the chosen template is missing."""
    for name in ("tool_use", "default") if has_tools else ("default",):
        if name in templates:
            return templates[name]
    raise RequestError(
        "the model has several chat templates and none is the default",
        where=", ".join(templates),
        expected="one named 'default'",
    )


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates can use as variables: variable -> text, such as {"bos_token": "<s>"}.

    `config` is the content of tokenizer_config.json. Names that it lacks are read from special_tokens_map.json, an
    older file.
    """
    older = read_json(folder / "special_tokens_map.json")
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name) or older.get(name)
        if isinstance(token, Mapping):  # an AddedToken, written out
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens
