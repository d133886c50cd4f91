"""`logit_bias`, `allowed_token_ids` and `bad_words`: what the device reads, when it is written, and what is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from op_values import ints, no_penalties
from served import EDITED, GREEDY, Numbers

from ingot.ir.edit_limits import MAX_BAD_WORDS, MAX_BIASES
from ingot.ir.errors import RequestError
from ingot.ir.ops.logit_edits import ANY_TOKEN
from ingot.ir.ops.penalties import Penalties, penalized
from ingot.runtime.params.logit_edits import edits_of
from ingot.runtime.params.sampling_params import SamplingParams


def completes(words: list[list[int]], outputs: list[int], token: int) -> bool:
    """Whether `token` after the outputs ends a bad word, which began in them."""
    after = [*outputs, token]
    return any(after[-len(word) :] == word for word in words)


@pytest.mark.parametrize("seed", range(6))
def test_the_device_forbids_what_plain_code_forbids(seed):
    """Random words, outputs and biases; the last token is known to the host, or to the device alone."""
    draw = random.Random(seed)
    vocab = draw.choice([33, 64, 70])
    words = [[draw.randrange(1, 4) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 9))]
    biases = {draw.randrange(vocab): draw.uniform(-5, 5) for _ in range(6)}
    allowed = [0, *(draw.randrange(vocab) for _ in range(20))] if draw.random() < 0.7 else None
    params = SamplingParams(
        logit_bias=biases, allowed_token_ids=allowed, bad_words=[" ".join(map(str, word)) for word in words]
    )
    edits = edits_of(params, vocab, Numbers())
    for _ in range(60):
        outputs = [draw.randrange(1, 4) for _ in range(draw.randint(0, 6))]
        in_flight = bool(outputs) and draw.random() < 0.5
        bans = edits.bans(outputs[:-1] if in_flight else outputs, in_flight=in_flight)
        assert len(set(bans)) == len(bans) and all(in_flight or after == ANY_TOKEN for after, _ in bans)
        last = outputs[-1] if in_flight else draw.randrange(4)  # another sequence's
        logits = torch.tensor([[draw.gauss(0, 3) for _ in range(vocab)]])
        rows = (torch.from_numpy(edits.row(bans))[None], ints(0), ints(last))
        found = penalized(logits, Penalties(*no_penalties(1, vocab)[:6], *rows))[0].tolist()
        for token in range(vocab):
            forbidden = completes(words, outputs, token) or (allowed is not None and token not in allowed)
            expected = -np.inf if forbidden else float(logits[0, token]) + biases.get(token, 0.0)
            assert found[token] == pytest.approx(expected, abs=1e-5), token


def test_words_are_banned_with_and_without_a_space_before(tokenizer):
    """As in vLLM: after a space too, if that gives as many tokens and another first one."""
    vocab = tokenizer.vocab_size
    words = ["cat", " cat", "the", "k", "日本語"]
    edits = edits_of(SamplingParams(bad_words=words), vocab, tokenizer)
    expected = set()
    for word in words:
        plain, spaced = (tokenizer.backend.encode(text).ids for text in (word.lstrip(), " " + word.lstrip()))
        expected |= {tuple(plain)}
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            expected |= {tuple(spaced)}
    single = [word[0] for word in expected if len(word) == 1]
    assert single and set(edits.words) == {word for word in expected if len(word) > 1} and edits.words
    assert not edits.allows_only(set(range(vocab)) - {*single, 0}) and edits.allows_only(set(range(vocab)) - {*single})


def test_rows_are_written_once_and_when_bans_change(serve):
    """Bans of two tokens hold for a whole request; longer ones are written when they begin. Others write nothing."""
    served = serve(max_batch=4, words=True)
    pairs = replace(EDITED, bad_words=["200 400", "400 800"], max_tokens=20)
    longer = replace(EDITED, max_tokens=20)
    asked = {"plain": GREEDY, "pairs": pairs, "longer": longer}
    counts = {}
    for name, params in asked.items():
        before = served.device.num_edits
        served.engine.add_request(name, [1, 2], params)
        assert served.drain()[name].outputs[0].token_ids == served.expected([1, 2], params)
        counts[name] = served.device.num_edits - before
    # Before the first token, which no word of two can end; before the second; when a word of three may end.
    assert counts["plain"] == 0 and counts["pairs"] == 2 and 2 < counts["longer"] < 20
    assert not served.scheduler._tables.edited


def test_n_sequences_share_their_edits(serve):
    served = serve(words=True)
    served.engine.add_request("a", [1, 2], replace(EDITED, temperature=1.0, seed=3, n=3))
    requests = list(served.scheduler.requests.values())
    assert len({id(request.edits) for request in requests}) == 1
    for index, output in enumerate(served.drain()["a"].outputs):
        assert output.token_ids == served.expected([1, 2], replace(EDITED, temperature=1.0), 3 + index)


BAD = {
    "a bias outside the vocabulary": ({"logit_bias": {997: 1.0}}, "997 in logit_bias"),
    "an allowed token outside the vocabulary": ({"allowed_token_ids": [1, 5000]}, "5000 in allowed_token_ids"),
    "a word outside the vocabulary": ({"bad_words": ["3 997"]}, "997 in bad_words"),
    "nothing left": ({"allowed_token_ids": [4], "bad_words": ["4"]}, "bans every token"),
    "only end tokens left": ({"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1}, "only end tokens"),
    "too many words": ({"bad_words": [str(one) for one in range(MAX_BAD_WORDS + 1)]}, "129 token sequences"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(serve, name):
    served = serve(words=True)
    params, message = BAD[name]
    with pytest.raises(RequestError, match=message) as caught:
        served.engine.add_request("a", [1, 2], SamplingParams(**params))
    assert caught.value.where.startswith("SamplingParams.") and caught.value.expected
    assert not served.engine.has_unfinished()


def test_words_need_a_tokenizer_and_tokens(serve, tokenizer):
    with pytest.raises(RequestError, match="without a tokenizer"):
        serve().engine.add_request("a", [1], SamplingParams(bad_words=["x"]))
    with pytest.raises(RequestError, match="no valid Unicode"):
        serve(tokenizer=tokenizer).engine.add_request("a", [1], SamplingParams(bad_words=["\ud800"]))


def test_normal_forms():
    params = SamplingParams(logit_bias={np.int64(3): 1, 5: np.float32(0.5)}, allowed_token_ids=[9, 2, 9])
    assert params.logit_bias == ((3, 1.0), (5, 0.5)) and params.allowed_token_ids == (2, 9) and params.edits_logits
    assert replace(params, seed=1) == replace(params, seed=1) and hash(params) == hash(replace(params))
    assert SamplingParams(bad_words=["a", "b", "a"]).bad_words == ("a", "b")
    assert SamplingParams(logit_bias={}, bad_words=None) == SamplingParams() and not SamplingParams().edits_logits
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), -100.0)).logit_bias) == MAX_BIASES
