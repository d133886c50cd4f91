"""What callers are told again and again: that it stays as it was, and that telling it copies nothing."""

import random
from dataclasses import FrozenInstanceError, fields

import pytest

from ingot.runtime.engines.growing import SoFar
from ingot.runtime.engines.outputs import CompletionOutput, RequestOutput
from ingot.runtime.pages.prefix_cache import PrefixCache
from ingot.runtime.params.sampling_params import SamplingParams


class Counting(list):
    """A list that counts the elements that are copied out of it."""

    copied = 0

    def __iter__(self):
        self.copied += len(self)
        return super().__iter__()

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.copied += len(found) if isinstance(index, slice) else 1
        return found


def test_a_view_is_the_list_that_it_was_made_of():
    draw, more = random.Random(0), [8]
    for _ in range(300):
        growing = [draw.randrange(5) for _ in range(draw.randrange(8))]
        copy, view = list(growing), SoFar(growing)
        growing += [7] * draw.randrange(4)
        assert view == copy and copy == view and view == SoFar(copy) and list(view) == copy and repr(view) == repr(copy)
        assert len(view) == len(copy) and bool(view) == bool(copy) and 7 not in view
        assert list(reversed(view)) == copy[::-1] and view + more == copy + more and more + view == more + copy
        ends = [draw.choice([None, *range(-9, 10)]) for _ in range(2)]
        part = slice(*ends, draw.choice([None, 1, 2, 3, -1, -2, -3]))
        assert view[part] == copy[part] and isinstance(view[part], list)
        for index in range(-9, 10):
            if -len(copy) <= index < len(copy):
                assert view[index] == copy[index]
            else:
                with pytest.raises(IndexError, match=str(index)):
                    view[index]


def test_a_view_differs_from_other_lists_and_cannot_be_changed():
    view = SoFar([1, 2])
    assert view != [1] and view != [1, 3] and view != (1, 2) and view != [1, 2, 3]
    with pytest.raises(TypeError):
        view[0] = 5
    with pytest.raises(TypeError):
        hash(view)


def test_outputs_are_frozen_and_hold_what_they_are_given():
    one = CompletionOutput(0, "text", [1], -0.5, [{}], "stop", "!")
    assert [getattr(one, field.name) for field in fields(one)] == [0, "text", [1], -0.5, [{}], "stop", "!"]
    whole = RequestOutput("r", "prompt", [1], [one], True, [None], 3)
    assert [getattr(whole, field.name) for field in fields(whole)] == ["r", "prompt", [1], [one], True, [None], 3]
    assert CompletionOutput(0, "", []) == CompletionOutput(0, "", [], None, None, None, None)
    assert RequestOutput("r", None, [1], [], False) == RequestOutput("r", None, [1], [], False, None, None)
    for output in (one, whole):
        with pytest.raises(FrozenInstanceError):
            output.finished = False
        with pytest.raises(FrozenInstanceError):
            setattr(output, fields(output)[0].name, 1)


@pytest.mark.parametrize("count", [10, 50])
def test_streaming_copies_a_token_once(serve, count):
    served = serve()
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=1)
    served.engine.add_request("a", [1, 2], params)
    (sequence,) = served.engine._groups["a"].sequences
    ids = sequence.request.output_ids = Counting()
    entries = sequence.logprobs.entries = Counting()
    outputs = []
    while served.engine.has_unfinished():
        outputs += served.step()
    # The last output has lists of its own; the tokens are also hashed, block by block, for the prefix cache.
    assert len(outputs) == count and count <= ids.copied <= 2 * count and entries.copied == count
    expected = served.expected([1, 2], params)
    assert [one.outputs[0].token_ids for one in outputs] == [expected[: place + 1] for place in range(count)]
    assert [len(one.outputs[0].logprobs) for one in outputs] == list(range(1, count + 1))
    assert type(outputs[-1].outputs[0].token_ids) is list and type(outputs[-1].outputs[0].logprobs) is list


@pytest.mark.parametrize("slots", [0, 12])
def test_sequences_that_decode_are_looked_at_when_a_page_is_full(serve, monkeypatch, slots):
    looks = []
    keep = PrefixCache.keep
    monkeypatch.setattr(PrefixCache, "keep", lambda self, one, **given: looks.append(one) or keep(self, one, **given))
    served = serve(page_size=16, max_seq_len=256, num_pages=64, slots=slots)
    for name in "abcd":
        served.engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=160), stream=False)
    served.drain()
    # Of 640 tokens: four sequences, ten pages each, and the steps in which they begin and end.
    assert 40 <= len(looks) <= 80
