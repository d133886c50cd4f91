"""Groups of caches with a window, on the fake device: what later tokens read is there, and nothing else is held."""

import random

import pytest
from drawn import drawn
from served import GREEDY, Served

from ingot.ir.cache.groups import FULL, CacheGroup, group_of_input, table_groups
from ingot.ir.errors import RequestError
from ingot.runtime.pages.block_hashes import BlockHashes
from ingot.runtime.params.sampling_params import SamplingParams


def test_names() -> None:
    window = CacheGroup.named("window_1024")
    assert window.name == "window_1024"
    assert (window.page_table, window.slots) == ("page_table_window_1024", "slots_window_1024")
    assert CacheGroup.named("window_1024") == window
    assert CacheGroup.named("full") == CacheGroup.named("window_0") == FULL
    assert group_of_input("slots_window_1024") == window and group_of_input("slots") == FULL
    for name in ("tokens", "slots_window_", "slots_window_01", "window_1024", "page_table_full"):
        assert group_of_input(name) is None
    assert table_groups(["slots", "page_table_window_8", "page_table", "page_table_window_4"]) == [
        FULL,
        CacheGroup.named("window_4"),
        CacheGroup.named("window_8"),
    ]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("kind", ["window", "chunked"])
def test_a_group_needs_no_more_pages_than_it_says(kind: str, size: int, page_size: int) -> None:
    group = CacheGroup.named(f"{kind}_{size}")
    most = 0
    for position in range(100):
        first = max(0, position - size + 1) if kind == "window" else position // size * size
        assert group.first_page(position, page_size) == first // page_size
        pages = position // page_size - first // page_size + 1
        assert pages <= group.pages_between_steps(position + 1, page_size)
        most = max(most, pages)
    assert most == group.pages_between_steps(100, page_size)


def test_a_long_sequence_holds_its_window() -> None:
    served = Served(max_seq_len=200, num_pages=64, lifetimes={"window_9": 10})
    served.engine.add_request("a", list(range(1, 41)), SamplingParams(temperature=0, max_tokens=100))
    output = served.drain()["a"].outputs[0]
    assert output.token_ids == served.expected(list(range(1, 41)), SamplingParams(temperature=0, max_tokens=100))
    assert served.device.most_group_pages <= CacheGroup.named("window_9").pages_between_steps(140, 4) == 3
    assert served.scheduler.num_preemptions == 0


def test_the_prefix_is_found_as_long_as_its_window_is_there() -> None:
    served = Served(max_seq_len=100, lifetimes={"window_8": 40})
    prompt = list(range(1, 41))
    served.engine.add_request("a", prompt, GREEDY)
    served.drain()
    served.engine.add_request("b", [*prompt, 50, 51], GREEDY)
    assert served.drain()["b"].num_cached_tokens == 40
    # What a later token reads has gone from the group with the window, and stays in the other.
    window = served.scheduler.pages.pools[1]
    window.forget(list(range(1, window.num_pages)))
    served.engine.add_request("c", [*prompt, 60], GREEDY)
    assert served.drain()["c"].num_cached_tokens == 0


def test_part_of_a_prefix_is_found_where_a_hole_is() -> None:
    served = Served(max_seq_len=100, max_tokens=64, lifetimes={"window_8": 40})
    prompt = list(range(1, 41))
    served.engine.add_request("a", prompt, GREEDY)
    served.drain()
    window = served.scheduler.pages.pools[1]
    hashes = BlockHashes(4)
    hashes.extend(prompt)
    (page,) = window.find([hashes.digests[8]])  # of tokens 32 to 35
    window.forget([page])
    served.engine.add_request("b", [*prompt, 50], GREEDY)
    assert served.drain()["b"].num_cached_tokens == 32


def test_what_never_fits_is_refused_by_group() -> None:
    served = Served(max_seq_len=64, num_pages=64, lifetimes={"window_32": 8})
    with pytest.raises(RequestError, match="of the group window_32"):
        served.engine.add_request("a", list(range(1, 50)), GREEDY)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", drawn(12, range(120)))
def test_random_runs(seed: int) -> None:
    """Prompts in pieces, preemption, shared beginnings, drafts, aborts, scratch pages, steps without memory: tokens are
    those of a sequence alone."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 5])
    lifetimes = {}
    for tokens in draw.sample([1, 2, 3, 5, 8, 13, 20], draw.choice([1, 1, 2])):
        group = CacheGroup.named(f"{draw.choice(['window', 'window', 'chunked'])}_{tokens}")
        least = group.pages_between_steps(64, size)
        lifetimes[group.name] = 1 + least + draw.choice([0, 1, 3, 20])
    longest = -(-63 // size)
    chunked = draw.random() < 0.8
    if not chunked:
        lifetimes = {name: longest + 1 + draw.choice([0, 5]) for name in lifetimes}
    served = Served(
        num_pages=longest + draw.choice([0, 2, 40]),
        page_size=size,
        max_tokens=draw.choice([6, 16, 40]) if chunked else 64,
        chunked_prefill=chunked,
        permute_seed=draw.choice([None, seed]),
        prefix_caching=draw.random() < 0.7,
        drafts=draw.choice([0, 0, 3]),
        lifetimes=lifetimes,
        with_scratch=seed % 3 > 0,
    )
    if seed % 3 == 2:
        served.device.has_memory = lambda inputs: inputs.sizes.B == 1 or draw.random() > 0.05
    base = [draw.randrange(1, 900) for _ in range(40)]
    asked = {}
    for number in range(14):
        prompt = base[: draw.randrange(0, 40)] + [draw.randrange(1, 900) for _ in range(draw.randrange(1, 12))]
        params = SamplingParams(
            temperature=0,
            max_tokens=draw.randrange(1, 64 - len(prompt)),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        )
        asked[str(number)] = prompt, params
    outputs = {}
    waiting = list(asked)
    for _ in range(4000):
        while waiting and draw.random() < 0.4:
            name = waiting.pop(0)
            served.engine.add_request(name, *asked[name])
        if draw.random() < 0.01 and served.scheduler.requests:
            name = draw.choice(list(served.scheduler.requests)).partition("[")[0]
            served.engine.abort(name)
            asked.pop(name, None)
        if not served.engine.has_unfinished():
            if not waiting:
                break
            continue
        for output in served.step():
            outputs[output.request_id] = output
    served.check_empty()
    for name, (prompt, params) in asked.items():
        assert outputs[name].finished and outputs[name].outputs[0].token_ids == served.expected(prompt, params)
