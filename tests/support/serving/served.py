"""An engine on a fake device, and what tests ask of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fake_device import VOCAB, FakeDevice, Knobs, hashed_logprobs, hashed_token

from ingot.ir.cache.groups import FULL, CacheGroup
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.outputs import Logprob, RequestOutput
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.params.logit_edits import LogitEdits
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import DEFAULT_FORCED, Policy, SchedulerConfig
from ingot.runtime.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Numbers:
    """Reads the words of `bad_words` as token ids: "7 9" are the tokens 7 and 9, and a space before changes nothing."""

    def encode_plain(self, text: str) -> list[int]:
        return [int(one) for one in text.split()]


class NumbersEngine(Engine):
    """An engine without a tokenizer that reads bad words as `Numbers` does."""

    def _edits(self, request: Request) -> LogitEdits | None:
        self._tokenizer = Numbers()  # type: ignore[assignment]
        try:
            return super()._edits(request)
        finally:
            self._tokenizer = None


# Few tokens, so that bad words of several tokens begin often; some token may always be chosen.
EDITED = SamplingParams(
    temperature=0,
    max_tokens=9,
    allowed_token_ids=[200, 400, 600, 800, 990],
    logit_bias={7: 1.5, 400: -2.0},
    bad_words=["990", "200 400", "400 400", "600 600 400", "800 600 600", "400 800 600 800"],
)


class Served:
    """An engine on a fake device, with what tests look at."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch: int = 4,
        max_tokens: int = 16,
        max_seq_len: int = 64,
        chunked_prefill: bool = True,
        permute_seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
        prefix_caching: bool = True,
        policy: Policy = "fcfs",
        drafts: int = 0,
        lifetimes: Mapping[str, int] | None = None,
        slots: int = 0,
        with_scratch: bool = False,
        words: bool = False,
        max_forced: int = DEFAULT_FORCED,
        stages: int = 1,
    ) -> None:
        scratch: dict[str, range] = {}
        for name, pages in (lifetimes or {}).items() if with_scratch else ():
            first = pages + 2  # where memory is mapped in large units, some numbers are left out
            scratch[name] = range(first, first + CacheGroup.named(name).pages_read_at_once(max_tokens, page_size))
        vocab = VOCAB if tokenizer is None else tokenizer.vocab_size
        sizes = num_pages, page_size, max_batch, max_tokens, vocab
        self.device = FakeDevice(*sizes, drafts, lifetimes, slots, scratch, stages)
        # Whatever is not written is poison, and so is what is worth nothing any more.
        self.pool = PagePool(num_pages, page_size, permute_seed=permute_seed, on_release=self.device.poison)
        self.config = SchedulerConfig(
            max_batch,
            max_tokens,
            max_seq_len,
            page_size,
            chunked_prefill,
            prefix_caching=prefix_caching,
            policy=policy,
            max_drafts=drafts,
            max_forced=max_forced,
            least_shared=1,
            stages=stages,
        )
        pools = {FULL: self.pool}
        for name, pages in (lifetimes or {}).items():
            group = CacheGroup.named(name)
            pools[group] = PagePool(
                pages,
                page_size,
                reserved=1,
                scratch=scratch.get(name, range(0)),
                permute_seed=permute_seed,
                on_release=self.device.poison_group(group),
            )
        self.slots = PagePool(slots, permute_seed=permute_seed, on_release=self.device.poison_slots) if slots else None
        self.scheduler = Scheduler(self.config, pools, self.device.layout, self.slots)
        engine = NumbersEngine if words else Engine
        self.engine = engine(self.device, self.scheduler, tokenizer, vocab_size=vocab, eos_token_ids=eos or None)
        self.vocab, self.eos, self.tokenizer = vocab, tuple(eos), tokenizer

    def expected(
        self, prompt: Sequence[int], params: SamplingParams, seed: int = 0, count: int | None = None
    ) -> list[int]:
        """The tokens that the model gives for a prompt alone, without any stop."""
        knobs = Knobs(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p, seed)
        if params.greedy:
            knobs = Knobs()
        if params.penalizes:
            penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            knobs = replace(knobs, **dict(zip(("repetition", "frequency", "presence"), penalties, strict=True)))
        count = count if count is not None else params.max_tokens
        context = list(prompt)
        for number in range(min(count, self.config.max_seq_len - len(prompt))):
            if params.penalizes:
                generated = tuple(sorted(context[len(prompt) :]))
                knobs = replace(knobs, counts=(tuple(sorted(set(prompt))), generated))
            banned = (*self.eos, *params.stop_token_ids) if number < params.min_tokens else ()
            if params.allowed_token_ids is not None:
                banned += tuple(set(range(self.vocab)) - set(params.allowed_token_ids))
            words = [Numbers().encode_plain(word) for word in params.bad_words]
            outputs = context[len(prompt) :]
            banned += tuple(word[-1] for word in words if outputs[len(outputs) + 1 - len(word) :] == word[:-1])
            knobs = replace(knobs, banned=banned, biases=tuple(sorted(params.logit_bias or ())))
            context.append(hashed_token(context, knobs, self.vocab))
        return context[len(prompt) :]

    def check_logprobs(self, output: RequestOutput, params: SamplingParams) -> None:
        """That a request got the log-probabilities that it asked for, as far as it went, and no others."""

        def entry(context: list[int], token: int, count: int) -> dict[int, Logprob]:
            ids, values, rank = hashed_logprobs(context, token, count)
            text = self.tokenizer and self.tokenizer.decode
            ranks = [rank, *range(1, count + 1)]
            return {
                one: Logprob(value, place, text([one], skip_special_tokens=False) if text else None)
                for one, value, place in zip(ids, values, ranks, strict=True)
            }

        prompt = output.prompt_token_ids
        for sequence in output.outputs:
            tokens = sequence.token_ids
            if params.logprobs is None:
                assert sequence.logprobs is None and sequence.cumulative_logprob is None
                continue
            assert sequence.logprobs == [
                entry(prompt + tokens[:place], token, params.logprobs) for place, token in enumerate(tokens)
            ]
            # The fake values are multiples of 1/64, whose sums are exact.
            chosen = (hashed_logprobs(prompt + tokens[:place], tokens[place], 0) for place in range(len(tokens)))
            assert sequence.cumulative_logprob == sum(values[0] for _, values, _ in chosen)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            expected = [entry(prompt[:place], prompt[place], params.prompt_logprobs) for place in range(1, len(prompt))]
            found = output.prompt_logprobs
            assert found[0] is None and found[1:] == expected[: len(found) - 1]
            assert len(found) == len(prompt) or not any(sequence.token_ids for sequence in output.outputs)

    def check(self) -> None:
        """What holds between any two steps."""
        scheduler = self.scheduler
        for place, (group, pool) in enumerate(zip(scheduler.pages.groups, scheduler.pages.pools, strict=True)):
            lists = [[page for page in one.pages[place] if page >= group.reserved] for one in scheduler.running]
            assert all(len(set(pages)) == len(pages) for pages in lists)
            table = scheduler._tables.pages[place]
            assert table.max() < pool.num_pages, "a scratch page stands in a page table between steps"
            for one in scheduler.running:
                assert table[one.row, : len(one.pages[place])].tolist() == one.pages[place]
            holders = Counter(page for pages in lists for page in pages)
            assert len(holders) == pool.num_held
            assert all(pool._holders[page] == count for page, count in holders.items())
            for page, digest in pool._digests.items():
                assert pool._kept[digest] == page and pool._free.count(page) == 0
        if self.slots is not None:
            slots = Counter(
                slot for one in scheduler.running for slot in {one.state_read, one.state_write} if slot >= 0
            )
            assert all(one.state_write >= 0 for one in scheduler.running) and len(slots) == self.slots.num_held
            assert all(self.slots._holders[slot] == count for slot, count in slots.items())
            assert all(slots[one.state_write] == 1 for one in scheduler.running)
        rows = len(scheduler.running) + scheduler.rows.num_free + scheduler.rows.num_ending
        assert rows == self.config.max_batch
        assert len({request.row for request in scheduler.running}) == len(scheduler.running)
        assert set(scheduler.requests.values()) == {*scheduler.running, *scheduler.waiting}
        assert all(not any(request.pages) and request.row == -1 for request in scheduler.waiting)
        for queue in (scheduler.running, scheduler.waiting):
            assert queue == sorted(queue, key=lambda request: request.rank)
        if self.config.policy == "fcfs":
            order = [request.request_id for request in (*scheduler.running, *scheduler.waiting)]
            assert order == list(scheduler.requests), "running and waiting are in order of arrival"

    def step(self) -> list:
        first = self.scheduler.running[0] if self.scheduler.running else None
        before, refused = first.preemptions if first else 0, self.device.num_refused
        outputs = self.engine.step()
        # A step that was refused may have changed the states of its sequences, which then begin again.
        spoiled = self.slots is not None and self.device.num_refused > refused
        assert spoiled or first is None or first.preemptions == before, "the first of those that run was preempted"
        self.check()
        return outputs

    def drain(self, max_steps: int = 5000) -> dict:
        """Run until nothing is left; the last output of every request."""
        last = {}
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                break
            for output in self.step():
                last[output.request_id] = output
        assert not self.engine.has_unfinished(), "it does not come to an end"
        self.check_empty()
        return last

    def check_empty(self) -> None:
        assert all(pool.num_free == pool.capacity for pool in self.scheduler.pages.pools)
        assert self.slots is None or self.slots.num_free == self.slots.capacity
        assert self.scheduler.rows.num_free == self.config.max_batch
        assert not self.scheduler.requests and not self.scheduler.running and not self.scheduler.waiting
        assert self.device.most_tokens <= self.config.max_tokens and self.device.most_sequences <= self.config.max_batch


def run(served, prompt="go", **params):
    """Serve one request to its end, greedily unless told otherwise; its only sequence."""
    served.engine.add_request("r", prompt, SamplingParams(**{"temperature": 0, "max_tokens": 40, **params}))
    output = served.drain()["r"]
    assert output.finished
    return output.outputs[0]
