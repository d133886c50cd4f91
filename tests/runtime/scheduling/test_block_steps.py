"""Steps of sequences whose tokens fall into blocks: how prompts are cut, and blocks that are fed until they are whole.

The device keeps what a real one keeps. Each slot of its cache holds the token that was fed there and whether its whole
block was fed with it; a token that it finds is a hash of all that stands before its block and of its position. What a
sequence reads of an unfinished block, of another sequence's or at a wrong place then changes tokens.
"""

import random
from dataclasses import dataclass, field

import pytest
from fake_device import VOCAB, hashed
from small_scheduler import request_of, scheduler_of, values

from ingot.ir.artifact.plan import Plan, Plans, ResidentMemory
from ingot.ir.errors import ArtifactError, OptionError, RequestError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.blocks import Blocks, blocks_of, max_drafts
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.runtime.steps.step import StepInputs, StepLayout

MASKED = -1


def found_token(context: list[int], position: int) -> int:
    return hashed([*context, position]) % VOCAB


@dataclass
class BlockDevice:
    """`seed` decides how many positions of a block each step finds."""

    block: int
    page_size: int
    seed: int
    cache: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    held: dict[int, list[int]] = field(default_factory=dict)
    launched: list["Handle"] = field(default_factory=list)
    tokens_fed: int = 0

    def launch(self, inputs: StepInputs) -> "Handle":
        self.launched.append(Handle(self, {name: array.tolist() for name, array in inputs.arrays.items()}))
        return self.launched[-1]


@dataclass
class Handle:
    device: BlockDevice
    inputs: dict[str, list]
    found: list[int] = field(default_factory=list)
    not_kept: list[int] = field(default_factory=list)

    def tokens(self) -> list[int]:
        device, step, size = self.device, self.inputs, self.device.block
        assert device.launched.pop(0) is self, "steps run in order"
        draw = random.Random(device.seed + device.tokens_fed)
        device.tokens_fed += len(step["tokens"])
        self.found = [MASKED] * len(step["logit_rows"])
        for b, row in enumerate(step["rows"]):
            begin, count, pages = step["q_starts"][b], step["q_lens"][b], step["page_table"][b]
            start = step["starts"][b] if step["starts"][b] >= 0 else device.position[row]
            fed = [device.held[row][-2 - one] if one < -1 else one for one in step["tokens"][begin : begin + count]]
            assert start % size == 0 and count % size == 0, "whole blocks are fed"
            slots = [
                pages[place // device.page_size] * device.page_size + place % device.page_size
                for place in range(start + count)
            ]
            for slot, token in zip(slots[start:], fed, strict=True):
                device.cache[slot] = token
            context = [device.cache[slot] for slot in slots]
            ends, self.not_kept = start + count, [*self.not_kept, 0]
            if (last := step["sample_index"][b]) >= 0:
                first, block = ends - size, context[-size:]
                assert MASKED not in context[:first], "what is unfinished is read"
                assert step["logit_rows"][last - size + 1 : last + 1] == list(
                    range(begin + count - size, begin + count)
                )
                if MASKED in block:
                    self.not_kept[b], ends = size, first
                    masked = [i for i, token in enumerate(block) if token == MASKED]
                    for i in draw.sample(masked, draw.randint(1, len(masked))):
                        block[i] = found_token(context[:first], first + i)
                    device.held[row] = block
                else:
                    self.found[last - size + 1 : last + 1] = block
                    device.held[row] = [MASKED] * size
            device.position[row] = ends
        return self.found

    def rejected(self) -> list[int]:
        return self.not_kept

    def finish(self) -> None: ...


def expected(prompt: list[int], count: int, block: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        first = len(tokens) // block * block
        context = tokens[:first]
        tokens += [found_token(context, place) for place in range(len(tokens), first + block)]
    return tokens[len(prompt) :][:count]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_work_in_small_pools(seed: int) -> None:
    draw = random.Random(seed)
    block, page_size = draw.choice([(2, 4), (4, 4), (8, 4), (6, 4), (4, 16)])
    device = BlockDevice(block, page_size, seed)
    longest = 12 * block
    config = SchedulerConfig(
        max_batch=3,
        max_tokens=draw.choice([3, 4, 9]) * block,
        max_seq_len=longest,
        page_size=page_size,
        blocks=Blocks(block, block),
        prefix_caching=draw.random() < 0.7,
    )
    pages = -(-longest // page_size) + draw.randint(0, 4)
    scheduler = Scheduler(config, one_pool(PagePool(pages, page_size, permute_seed=seed)), StepLayout.usual())
    engine = Engine(device, scheduler, None, vocab_size=VOCAB, eos_token_ids=())
    trunks = [[draw.randrange(VOCAB) for _ in range(longest // 2)] for _ in range(2)]
    asked, outputs, waiting = {}, {}, 14
    while waiting or engine.has_unfinished():
        if waiting and draw.random() < 0.4:
            waiting -= 1
            prompt = draw.choice(trunks)[: draw.randint(1, longest // 2)] + [draw.randrange(VOCAB)] * draw.randint(0, 3)
            count = draw.randint(1, longest - len(prompt))
            wanted = expected(prompt, count, block)
            stops = draw.sample(wanted, 1) if draw.random() < 0.3 else []
            if stops:
                wanted = wanted[: wanted.index(stops[0]) + 1]
            asked[str(waiting)] = wanted
            params = SamplingParams(temperature=0, max_tokens=count, stop_token_ids=stops, detokenize=False)
            engine.add_request(str(waiting), {"prompt_token_ids": prompt}, params)
        if engine.has_unfinished():
            outputs |= {one.request_id: one for one in engine.step() if one.finished}
    assert {name: list(one.outputs[0].token_ids) for name, one in outputs.items()} == asked
    assert scheduler.occupancy.pages_held == scheduler.occupancy.pages_releasing == 0


def fed(batch):
    """What a step feeds of each sequence: its start as the device gets it, and its tokens."""
    step = values(batch)
    ends = zip(step["starts"], step["q_starts"], step["q_lens"], strict=True)
    return [(start, step["tokens"][begin : begin + count]) for start, begin, count in ends]


def test_a_block_is_fed_until_it_is_whole() -> None:
    scheduler = scheduler_of(max_tokens=32, blocks=Blocks(4, 4))
    scheduler.add(request := request_of("a", 6, max_tokens=5))
    first = scheduler.schedule()
    assert fed(first) == [(0, [1, 2, 3, 4, 5, 6, MASKED, MASKED])] and values(first)["logit_rows"] == [4, 5, 6, 7]
    held = [(-1, [-2, -3, -4, -5])]
    second = scheduler.schedule()
    assert fed(second) == held
    assert scheduler.retire(first, [0] * 4, [4]) == [] and request.num_computed == 8
    third = scheduler.schedule()
    assert fed(third) == held
    accepted = scheduler.retire(second, [5, 6, 70, 71], [0])
    assert [(token, row) for _, token, row in accepted] == [(70, 2), (71, 3)], "the others are the prompt's"
    assert scheduler.schedule() is None, "the last block may end in flight"
    assert scheduler.retire(third, [0] * 4, [4]) == [] and request.num_computed == 8
    last = scheduler.schedule()
    assert fed(last) == held
    assert [token for _, token, _ in scheduler.retire(last, [72, 73, 74, 75], [0])] == [72, 73, 74]
    assert request.end.reason == "length" and scheduler.pages.num_held == 0


def test_a_step_that_had_no_memory_begins_its_block_anew() -> None:
    scheduler = scheduler_of(max_tokens=32, blocks=Blocks(4, 4))
    scheduler.add(request := request_of("a", 4, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.withdraw(second) is request
    scheduler.retire(first, [0] * 4, [4])
    third = scheduler.schedule()
    assert fed(third) == [(4, [MASKED] * 4)]
    assert scheduler.withdraw(third) is request
    assert fed(scheduler.schedule()) == [(4, [MASKED] * 4)]


def lengths(scheduler) -> list[int]:
    return values(scheduler.schedule())["q_lens"]


@pytest.mark.parametrize(("granule", "pieces"), [(1, [14, 14, 1]), (4, [12, 12, 5]), (8, [8, 8, 13])])
def test_prompts_are_cut_between_blocks(granule: int, pieces: list[int]) -> None:
    """Where each token gives the next one, too; the end of a prompt may stand inside a block."""
    scheduler = scheduler_of(max_tokens=14, blocks=Blocks(granule))
    scheduler.add(request_of("a", 29))
    found = []
    for _ in pieces:
        batch = scheduler.schedule()
        found += values(batch)["q_lens"]
        scheduler.retire(batch, [0] * batch.inputs.sizes.L)
    assert found == pieces


def test_what_sees_itself_whole_is_fed_at_once() -> None:
    whole = Blocks(1 << 30)
    scheduler = scheduler_of(max_tokens=16, max_mixed_tokens=4, blocks=whole, prefix_caching=True)
    scheduler.add(request_of("a", 5))
    assert lengths(scheduler) == [5]
    scheduler.add(request_of("b", 13))
    assert lengths(scheduler) == [1, 13], "it is not held back"
    with pytest.raises(RequestError, match="17 tokens of the prompt see each other"):
        scheduler.add(request_of("c", 17))
    with pytest.raises(RequestError, match="are fed in one step, with prompt_logprobs"):
        scheduler_of(max_tokens=512, max_seq_len=512, blocks=whole).add(request_of("d", 300, prompt_logprobs=1))


@pytest.mark.parametrize(
    ("block", "prompt", "found"), [(4, 16, 16), (4, 18, 16), (8, 20, 16), (6, 16, 12), (12, 22, 12)]
)
def test_whole_blocks_are_found_and_no_others(block: int, prompt: int, found: int) -> None:
    """Pages have 4 tokens; one that holds a part of a block is not found."""
    scheduler = scheduler_of(max_tokens=48, max_seq_len=48, prefix_caching=True, blocks=Blocks(block, block))
    scheduler.add(request_of("a", prompt))
    batch = scheduler.schedule()
    scheduler.schedule()
    scheduler.retire(batch, [0] * block, [block])
    scheduler.add(later := request_of("b", prompt))
    scheduler.schedule()
    assert later.cached.num_found == found


@pytest.mark.parametrize(
    ("ending", "granule", "blocks"),
    [
        ("sample", 1, Blocks()),
        ("sample", 6, Blocks(6)),
        ("verify(drafted=3)", 1, Blocks()),
        ("block(block=8, mask_token=3)", 8, Blocks(8, 8)),
        ("block(block=8, mask_token=3)", 4, Blocks(4, 8)),
    ],
)
def test_plans_say_what_the_blocks_are(ending: str, granule: int, blocks: Blocks) -> None:
    assert blocks_of(plans(ending, granule)) == blocks
    assert max_drafts(plans(ending, granule)) == (3 if "drafted" in ending else 0)


def test_a_block_holds_what_sees_itself_whole() -> None:
    with pytest.raises(ArtifactError, match="denoises blocks of 8 positions, but the masks let 16 positions see"):
        blocks_of(plans("block(block=8, mask_token=3)", 16))


def plans(ending: str, granule: int) -> Plans:
    parts: dict = {name: {} for name in ("dims", "inputs", "params", "states", "outputs", "executables")}
    memory = ResidentMemory(weights=0, states=0, inputs=0, outputs=0)
    return Plans(plans={"main": Plan(entry="main", ending=ending, granule=granule, memory=memory, buckets=(), **parts)})


def test_each_running_sequence_can_feed_its_block() -> None:
    with pytest.raises(OptionError, match="max_batch \\* 8 = 32") as caught:
        scheduler_of(max_tokens=31, blocks=Blocks(8, 8))
    assert "max_num_seqs=3" in caught.value.hint
