"""Random requests in small pools get the tokens that each gets alone."""

import random
from dataclasses import replace

import pytest
from drawn import drawn
from served import EDITED

from ingot.runtime.params.sampling_params import SamplingParams


def workload(rng, vocab, max_seq_len, count, longest_prompt):
    work = []
    for _ in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, longest_prompt))]
        greedy = rng.random() < 0.3
        params = SamplingParams(
            temperature=0 if greedy else rng.choice([0.5, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.5]),
            min_p=rng.choice([0.0, 0.25]),
            typical_p=rng.choice([1.0, 0.75]),
            seed=rng.randrange(2**40),
            max_tokens=rng.randint(1, max_seq_len - len(prompt)),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 0, 2]),
        )
        if rng.random() < 0.2:
            edits = {name: getattr(EDITED, name) for name in ("allowed_token_ids", "logit_bias", "bad_words")}
            params = replace(params, **edits)
        work.append((prompt, params))
    return work


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("drafts", "stages"), [(0, 1), (3, 1), (0, 2), (0, 5)], ids=["plain", "drafts", "2 stages", "5 stages"]
)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("seed", drawn(4, range(25)))
def test_random_work_in_small_pools(serve, seed, chunked, drafts, stages):
    """Random arrivals, aborts and stops; pages permuted and poisoned; tokens equal those of each request alone."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    max_seq_len = rng.randint(10, 40)
    max_batch = rng.randint(1, 6)
    max_tokens = max(max_batch, rng.randint(1, 24))
    least = -(-max_seq_len // page_size)
    served = serve(
        num_pages=rng.randint(least, least * 2 + 2),
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        chunked_prefill=chunked,
        permute_seed=seed,
        drafts=drafts,
        words=True,
        stages=stages,
    )
    longest = max_seq_len - 1 if chunked else min(max_tokens, max_seq_len - 1)
    work = workload(rng, served.vocab, max_seq_len, 25, longest)
    last, aborted, stopped, partial = {}, set(), {}, {}
    pending = list(enumerate(work))
    while pending or served.engine.has_unfinished():
        while pending and rng.random() < 0.4:
            index, (prompt, params) = pending.pop(0)
            name = str(index)
            expected = served.expected(prompt, params, params.seed)
            if rng.random() < 0.3:
                at = rng.randrange(len(expected))
                at = expected.index(expected[at])
                stopped[name] = expected[: at + 1]
                params = replace(params, stop_token_ids=(expected[at],))
            served.engine.add_request(name, prompt, params)
        for output in served.step():
            last[output.request_id] = output
            ids = output.outputs[0].token_ids
            assert ids[: len(partial.get(output.request_id, []))] == partial.get(output.request_id, [])
            partial[output.request_id] = ids
        alive = [group for group in served.engine._groups if group not in aborted]
        if alive and rng.random() < 0.03:
            name = rng.choice(alive)
            last[name] = served.engine.abort(name)
            aborted.add(name)
            served.check()
    served.check_empty()
    assert set(last) == {str(index) for index in range(len(work))}
    for index, (prompt, params) in enumerate(work):
        served.check_logprobs(last[str(index)], params)
        output = last[str(index)].outputs[0]
        expected = served.expected(prompt, params, params.seed)
        if str(index) in aborted:
            assert output.finish_reason == "abort" and output.token_ids == expected[: len(output.token_ids)]
        elif str(index) in stopped:
            assert output.finish_reason == "stop" and output.token_ids == stopped[str(index)]
        else:
            assert output.finish_reason == "length" and output.token_ids == expected
    # With stages, both depend on how many sequences fit.
    assert stages > 1 or (served.device.num_on_device > 0 and served.device.most_launched == 2)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_a_small_pool_preempts_and_gives_the_tokens_of_an_ample_one(serve, chunked):
    rng = random.Random(3)
    work = workload(rng, 997, 48, 12, 16)
    results = []
    for num_pages in (13, 200):
        served = serve(num_pages=num_pages, max_batch=6, max_seq_len=48, chunked_prefill=chunked, words=True)
        for index, (prompt, params) in enumerate(work):
            served.engine.add_request(str(index), prompt, params)
        requests = list(served.scheduler.requests.values())
        last = served.drain()
        results.append([last[str(index)].outputs[0].token_ids for index in range(len(work))])
        preemptions = sum(request.preemptions for request in requests)
        assert (preemptions > 5) == (num_pages == 13)
    assert results[0] == results[1]
