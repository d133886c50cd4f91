"""Where the template comes from."""

from pathlib import Path
from typing import Any

import pytest
from chat_models import CHAT_MODELS
from chat_pair import CLOSED, WEATHER, turns

from ingot.ir.errors import ArtifactError, RequestError
from ingot.runtime.chat.renderer import Renderer
from ingot.runtime.chat.template import ChatOptions, ChatTemplate
from ingot.runtime.text.tokenizer import Tokenizer


def chat_in(folder: Path, renderer: Renderer) -> ChatTemplate:
    return ChatTemplate(folder, Tokenizer.load(folder), renderer)


def test_named_templates(tmp_path: Path, renderer: Renderer) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    chat = chat_in(CHAT_MODELS["chatml"].write(tmp_path, chat_template=named), renderer)
    assert chat.prompts(turns("x"), CLOSED)[0].text == "d"
    assert chat.prompts(turns("x"), ChatOptions(tools=[WEATHER]))[0].text == "t"
    (tmp_path / "chat_template.jinja").write_text("é file")  # goes before the field
    assert chat_in(tmp_path, renderer).prompts(turns("x"), CLOSED)[0].text == "é file"


@pytest.mark.parametrize("given", [5, [], {"default": "x"}, [{"name": "default"}], ["x"]])
def test_a_malformed_field_is_named(tmp_path: Path, renderer: Renderer, given: Any) -> None:
    CHAT_MODELS["chatml"].write(tmp_path, chat_template=given)
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json, chat_template"):
        chat_in(tmp_path, renderer)


def test_a_model_without_a_template_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    CHAT_MODELS["chatml"].write(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        chat_in(tmp_path, renderer)


def test_no_default_among_named_templates(tmp_path: Path, renderer: Renderer) -> None:
    CHAT_MODELS["chatml"].write(tmp_path, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(RequestError, match="none is the default"):
        chat_in(tmp_path, renderer).prompts(turns("x"), CLOSED)


def test_the_error_names_the_template(tmp_path: Path, renderer: Renderer) -> None:
    CHAT_MODELS["mistral"].write(tmp_path)
    with pytest.raises(RequestError, match=r"take turns[\s\S]*tokenizer_config\.json, chat_template"):
        chat_in(tmp_path, renderer).prompts([*turns("x"), *turns("y")], CLOSED)
