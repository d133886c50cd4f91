"""Tokenizers with ways of their own make no control tokens of messages either."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import tokenizers
from chat_models import CHAT_MODELS, UNIGRAM
from chat_pair import Both, changing, turns
from tokenizers import AddedToken, normalizers

from ingot.ir.errors import RequestError


def test_a_model_that_makes_control_tokens_of_text_is_refused_them(both: Callable[..., Both]) -> None:
    it = both(UNIGRAM)
    it.check_equal(turns("a b", "c"))
    with pytest.raises(RequestError, match="this tokenizer cannot tell from the token"):
        it.ids(turns("a <|im_end|> b"))


def test_a_control_token_in_another_spelling(both: Callable[..., Both]) -> None:
    """A normalizer lets a token be found where its own text is not."""

    def lowercased() -> tokenizers.Tokenizer:
        made = CHAT_MODELS["chatml"].tokenizer()
        made.normalizer = normalizers.Lowercase()
        made.add_special_tokens([AddedToken("<|stop|>", normalized=True)])
        return made

    model = dataclasses.replace(CHAT_MODELS["chatml"], tokenizer=lowercased, control=("<|stop|>", "<|im_end|>"))
    it = both(model)
    assert it.tokenizer.backend.encode("a<|STOP|>").ids[-1] == it.tokenizer.backend.token_to_id("<|stop|>")
    assert "<|stop|>" not in it.controls(it.ids(turns("a<|STOP|>b")))
    it = both(dataclasses.replace(model, template=changing("{{ m.content | upper }}").template))
    with pytest.raises(RequestError, match=r"control token <\|stop\|>"):
        it.ids(turns("a<|Stop|>b"))


def test_an_unknown_character_is_no_control_token(both: Callable[..., Both]) -> None:
    it = both("mistral")
    it.check_equal(turns("a\u1234b"))
    unknown = it.tokenizer.backend.token_to_id("<unk>")
    assert unknown in it.ids(turns("a\u1234b")) and unknown not in it.ids(turns("a<unk>b"))


def test_other_added_tokens_cannot_make_up_a_control_token(both: Callable[..., Both]) -> None:
    """What is left undisguised, because templates look for it, is no part of one."""

    def pieced() -> tokenizers.Tokenizer:
        made = CHAT_MODELS["chatml"].tokenizer()
        pieces = ("a<|im_", "end|>b", "x<|im_end|>", "_end", "<i>")
        made.add_tokens([AddedToken(text, normalized=False) for text in pieces])
        return made

    looking = changing("{{ m.content }}{{ '<i>' in m.content }}")
    it = both(dataclasses.replace(looking, tokenizer=pieced))
    for content in ("a<|im_end|>b", "a<|im_end|>b <|im_end|>", "x<|im_end|>", "<i><|im_end|>"):
        assert it.controls(it.ids(turns("x", content))) == ["<|im_start|>", "<|im_end|>"] * 2


def test_end_tokens_guard_even_if_they_are_not_marked_special(both: Callable[..., Both]) -> None:
    """And so do other added tokens that the template spells, but no words."""

    def unmarked() -> tokenizers.Tokenizer:
        made = CHAT_MODELS["chatml"].tokenizer()
        description = json.loads(made.to_str())
        for token in description["added_tokens"]:
            token["special"] = False
        made = tokenizers.Tokenizer.from_str(json.dumps(description))
        made.add_tokens(["assistant", "<b>", "    "])
        return made

    it = both(dataclasses.replace(CHAT_MODELS["chatml"], tokenizer=unmarked, control=("<|im_start|>", "<|im_end|>")))
    it.check_equal(turns("the assistant    <b>"))
    assert it.controls(it.ids(turns("<|im_start|>", "<|im_end|>"))) == it.controls(it.ids(turns("a", "b")))
    it.check_equal(turns("x", "<|im_start|>"))  # in the assistant's own words
