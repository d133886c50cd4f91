"""One renderer, and each chat model by Ingot and by transformers, made once for the tests of a process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_models import CHAT_MODELS, ChatModel
from chat_pair import Both

from ingot.runtime.chat.renderer import Renderer
from ingot.runtime.chat.template import ChatTemplate
from ingot.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    made = Renderer(seconds=60.0)
    yield made
    made.close()


@pytest.fixture(scope="session")
def both(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Both]:
    from transformers import AutoTokenizer

    made: dict[Any, Both] = {}

    def get(model: str | ChatModel) -> Both:
        if model not in made:
            of = CHAT_MODELS[model] if isinstance(model, str) else model
            folder = of.write(tmp_path_factory.mktemp("tokenizer"))
            tokenizer = Tokenizer.load(folder)
            theirs = AutoTokenizer.from_pretrained(folder)
            made[model] = Both(of, ChatTemplate(folder, tokenizer, renderer), tokenizer, theirs)
        return made[model]

    return get
