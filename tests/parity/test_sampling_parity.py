"""Penalties, held-back end tokens and log-probabilities of a served model against a loop over transformers.

One tiny checkpoint with a context of 640, so that a prompt's log-probabilities take more rows of logits than one step
gives.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Numbers, NumbersEngine
from tiny import TINY

from ingot import LLM, RequestOutput, SamplingParams, compile_model
from ingot.ir.errors import RequestError
from ingot.ir.logprob_limits import MAX_SCORED

# One worker, for the artifact that tests share.
pytestmark = [pytest.mark.xdist_group("sampling-parity"), pytest.mark.one_in_file(3)]

NAME, CONTEXT = "llama-plain", 640
VOCAB = TINY[NAME].config["vocab_size"]
NEW_TOKENS = 24
MARGIN = 1e-3  # between the two most likely tokens: below it, which one wins is a matter of rounding
TOLERANCE = 1e-4  # of a log-probability


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY[NAME].write(tmp_path_factory.mktemp("sampling") / NAME, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def compiled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("artifact") / "sampling.ingot"
    compile_model(folder, output, backend="reference", max_batch=6, max_tokens=400, max_seq_len=CONTEXT, jobs=1)
    return output


@pytest.fixture(scope="session")
def llm(compiled: Path) -> LLM:
    return LLM(compiled)


@pytest.fixture(scope="session")
def logits(folder: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """transformers' logits f32[n, vocab] of a whole sequence."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def get(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            rows: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return rows

    return get


def greedy(logits: Callable[..., torch.Tensor], prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens up to the first one that is not clearly the most likely one."""
    tokens: list[int] = []
    for number in range(params.max_tokens or 0):
        scores = logits(prompt + tokens)[-1].clone()
        for token, bias in params.logit_bias or ():
            scores[token] += bias
        for token in {*prompt, *tokens}:
            r = params.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        for token, count in Counter(tokens).items():
            scores[token] -= count * params.frequency_penalty
            scores[token] -= params.presence_penalty
        if number < params.min_tokens:
            scores[list(params.stop_token_ids)] = -torch.inf
        if params.allowed_token_ids is not None:
            scores[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -torch.inf
        for word in map(Numbers().encode_plain, params.bad_words):
            if tokens[len(tokens) + 1 - len(word) :] == word[:-1]:
                scores[word[-1]] = -torch.inf
        first, second = scores.topk(2).values.tolist()
        if first - second < MARGIN:
            break
        tokens.append(int(scores.argmax()))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens


def random_prompt(seed: int, length: int) -> list[int]:
    """Of few different tokens, so that penalties have much to do."""
    draw = random.Random(seed)
    return [draw.randrange(3, 60) for _ in range(length)]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SETTINGS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.4),
    replace(GREEDY, frequency_penalty=1.3),
    replace(GREEDY, presence_penalty=1.7),
    replace(GREEDY, repetition_penalty=0.8),
    replace(GREEDY, frequency_penalty=-1.5),
    replace(GREEDY, presence_penalty=-2.0),
    replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.6, logprobs=2),
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, prompt_logprobs=0),
    replace(GREEDY, logit_bias={token: 2.5 for token in range(0, VOCAB, 3)}, presence_penalty=1.1),
    replace(GREEDY, allowed_token_ids=[*range(0, VOCAB, 3)], frequency_penalty=0.8, logprobs=3),
]
PROMPTS = [random_prompt(number, 20 + 7 * number) for number in range(len(SETTINGS))]


@pytest.fixture(scope="session")
def expected(logits: Callable[..., torch.Tensor]) -> list[list[int]]:
    """One prompt for each setting, and the tokens that the oracle is sure of."""
    found = [greedy(logits, prompt, params) for prompt, params in zip(PROMPTS, SETTINGS, strict=True)]
    assert sum(map(len, found)) >= NEW_TOKENS * len(found) * 3 // 4, "the seeds give too many close calls"
    # A penalty that changed nothing would be compared with nothing.
    for prompt, params, tokens in zip(PROMPTS, SETTINGS, found, strict=True):
        plain = replace(GREEDY, max_tokens=NEW_TOKENS)
        assert not params.penalizes or greedy(logits, prompt, plain)[: len(tokens)] != tokens
    return found


def assert_agree(outputs: list[RequestOutput], expected: list[list[int]]) -> None:
    for number, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        assert output.outputs[0].token_ids[: len(tokens)] == tokens, f"request {number}"


def test_each_penalty_in_one_batch(llm: LLM, expected: list[list[int]]) -> None:
    """More requests than rows, with penalties and without: rows are used again by others."""
    assert_agree(generate(llm, PROMPTS, SETTINGS), expected)
    assert_agree(generate(llm, PROMPTS[::-1], SETTINGS[::-1]), expected[::-1])


@pytest.mark.parametrize("chunk", [None, 17])
def test_penalties_under_preemption(compiled: Path, expected: list[list[int]], chunk: int | None) -> None:
    """What is computed again counts what it had generated as generated, and not as prompt."""
    llm = LLM(compiled, num_kv_pages=10, max_num_batched_tokens=chunk)
    assert_agree(generate(llm, PROMPTS, SETTINGS), expected)
    assert llm._engine._scheduler.num_preemptions >= 3


def test_min_tokens_hold_back_end_tokens(llm: LLM, logits: Callable[..., torch.Tensor]) -> None:
    plain = greedy(logits, PROMPTS[0], GREEDY)
    stops = tuple(plain[4:7])
    params = [replace(GREEDY, stop_token_ids=stops, min_tokens=count) for count in (0, 1, 6, 12, NEW_TOKENS)]
    outputs = generate(llm, [PROMPTS[0]] * len(params), params)
    for output, one in zip(outputs, params, strict=True):
        found, tokens = output.outputs[0], greedy(logits, PROMPTS[0], one)
        assert found.token_ids[: len(tokens)] == tokens
        assert len(found.token_ids) >= one.min_tokens and not set(stops) & set(found.token_ids[: one.min_tokens])
        assert found.finish_reason == ("stop" if found.token_ids[-1] in stops else "length")
    assert outputs[0].outputs[0].finish_reason == outputs[1].outputs[0].finish_reason == "stop"


def test_min_tokens_hold_back_the_models_own_end_token(
    llm: LLM, logits: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = greedy(logits, PROMPTS[0], GREEDY)
    monkeypatch.setattr(llm._engine, "_eos_ids", frozenset({plain[3]}))
    ends = replace(GREEDY, ignore_eos=False)
    params = [ends, replace(ends, min_tokens=10), replace(ends, min_tokens=10, ignore_eos=True)]
    ended, held, ignored = (one.outputs[0].token_ids for one in generate(llm, [PROMPTS[0]] * 3, params))
    assert ended == plain[: plain.index(plain[3]) + 1] and ignored[: len(plain)] == plain
    wanted = greedy(logits, PROMPTS[0], replace(GREEDY, min_tokens=10, stop_token_ids=(plain[3],)))
    assert held[: len(wanted)] == wanted and len(held) >= 10 and plain[3] not in held[:10]


def test_too_many_end_tokens_to_hold_back(llm: LLM) -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=list(range(5, 21)))  # 16, and the model's own
    with pytest.raises(RequestError, match="17 end tokens"):
        generate(llm, [[1]], [params])
    generate(llm, [[1]], [replace(params, ignore_eos=True)])
    generate(llm, [[1]], [replace(params, min_tokens=0)])


def test_bad_words_under_preemption(
    compiled: Path, logits: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of one to three tokens that the model would generate: each may begin and may not end."""
    llm = LLM(compiled, num_kv_pages=7)
    monkeypatch.setattr(llm._engine, "__class__", NumbersEngine)
    asked = []
    for prompt in PROMPTS[:3]:
        params = GREEDY
        for place, length in ((2, 1), (5, 2), (9, 3), (1, 2)):  # each changes what comes after
            tokens = greedy(logits, prompt, params)[place : place + length]
            params = replace(params, bad_words=[*params.bad_words, " ".join(map(str, tokens))] if tokens else ())
        asked.append(params)
    expected = [greedy(logits, prompt, params) for prompt, params in zip(PROMPTS, asked, strict=False)]
    assert sum(map(len, expected)) >= NEW_TOKENS * len(expected) // 2
    assert_agree(generate(llm, PROMPTS[:3], asked), expected)
    assert llm._engine._scheduler.num_preemptions


def assert_entry(entry: dict[int, Any], token: int, count: int, scores: torch.Tensor) -> None:
    """An entry of `logprobs`, against a row of transformers' logits."""
    exact = scores.double().log_softmax(-1)
    best = exact.topk(count).values.tolist()
    assert next(iter(entry)) == token and len(entry) in (count, count + 1)
    assert abs(entry[token].logprob - float(exact[token])) <= TOLERANCE
    more_likely = int((exact > exact[token] + TOLERANCE).sum()), int((exact > exact[token] - TOLERANCE).sum())
    assert more_likely[0] < entry[token].rank <= more_likely[1] + 1
    listed = sorted(((one.rank, one.logprob, key) for key, one in entry.items() if one.rank <= count))
    assert [rank for rank, _, _ in listed] == list(range(1, count + 1))
    for (_, value, key), wanted in zip(listed, best, strict=True):
        assert abs(value - wanted) <= TOLERANCE and abs(value - float(exact[key])) <= TOLERANCE


def assert_logprobs(output: RequestOutput, params: SamplingParams, logits: Callable[..., torch.Tensor]) -> None:
    prompt = output.prompt_token_ids
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        rows, entries = logits(prompt), output.prompt_logprobs
        assert entries is not None and entries[0] is None and len(entries) == len(prompt)
        for place in range(1, len(prompt)):
            assert_entry(entries[place] or {}, prompt[place], params.prompt_logprobs, rows[place - 1])
    for one in output.outputs:
        if params.logprobs is None:
            assert one.logprobs is None and one.cumulative_logprob is None
            continue
        rows = logits(prompt + one.token_ids)[len(prompt) - 1 :]
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
        for place, (entry, token) in enumerate(zip(one.logprobs, one.token_ids, strict=True)):
            assert_entry(entry, token, params.logprobs, rows[place])
        exact = rows[:-1].double().log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None]).sum()
        assert one.cumulative_logprob == pytest.approx(float(exact), abs=TOLERANCE * len(one.token_ids))


MIXED = [
    (9, SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True, logprobs=20)),
    (600, SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=3, logprobs=0)),
    (40, SamplingParams(temperature=0.8, top_k=5, presence_penalty=1.5, seed=2, max_tokens=20, logprobs=5)),
    (33, SamplingParams(temperature=0.7, seed=3, max_tokens=9)),
    (300, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, prompt_logprobs=0)),
    (1, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=20)),
    (257, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, repetition_penalty=1.5)),
]


@pytest.mark.parametrize(("num_pages", "chunk"), [(None, None), (45, None), (40, 23)])
def test_logprobs_of_outputs_and_prompts(
    compiled: Path, logits: Callable[..., torch.Tensor], num_pages: int | None, chunk: int | None
) -> None:
    """Whatever is served beside, in whatever pieces, preempted or not; penalties do not show in them."""
    llm = LLM(compiled, num_kv_pages=num_pages, max_num_batched_tokens=chunk)
    steps: list[int] = []
    launch = llm._loaded.executor.launch

    def watched(inputs: Any) -> Any:
        steps.append(int((inputs["targets"] >= 0).sum()))
        return launch(inputs)

    llm._loaded.executor.launch = watched  # type: ignore[method-assign]
    prompts = [random_prompt(number, length) for number, (length, _) in enumerate(MIXED)]
    outputs = generate(llm, prompts, [params for _, params in MIXED])
    for output, (_, params) in zip(outputs, MIXED, strict=True):
        assert_logprobs(output, params, logits)
    # Each position of a prompt is scored once, though a prompt is fed again after a preemption.
    scored = sum(length - 1 for length, params in MIXED if params.prompt_logprobs is not None)
    assert sum(steps) == scored and max(steps) == (MAX_SCORED if chunk is None else chunk)
    assert (llm._engine._scheduler.num_preemptions > 0) == (num_pages is not None)


def test_who_asks_does_not_change_the_tokens_of_others(llm: LLM) -> None:
    plain = [SamplingParams(temperature=1.0, seed=number, max_tokens=12, ignore_eos=True) for number in range(3)]
    alone = generate(llm, PROMPTS[:3], plain)
    scored = [replace(plain[0], logprobs=4), plain[1], replace(plain[2], prompt_logprobs=1)]
    together = generate(llm, PROMPTS[:3] + PROMPTS[4:6], [*scored, *SETTINGS[4:6]])
    assert [output.outputs[0].token_ids for output in together[:3]] == [output.outputs[0].token_ids for output in alone]


def test_streams_grow_with_their_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    seen = list(llm.stream({"prompt_token_ids": PROMPTS[0]}, params))
    assert [len(output.outputs[0].logprobs or ()) for output in seen] == [1, 2, 3, 4, 5]
    assert all(len(output.prompt_logprobs or ()) == len(PROMPTS[0]) for output in seen)
    assert seen[-1].outputs[0].cumulative_logprob == sum(
        entry[token].logprob
        for entry, token in zip(seen[-1].outputs[0].logprobs or (), seen[-1].outputs[0].token_ids, strict=True)
    )


def test_a_prompt_to_be_scored_may_be_too_long_for_one_step(compiled: Path) -> None:
    llm = LLM(compiled, enable_chunked_prefill=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with pytest.raises(RequestError, match="258 tokens of the prompt are fed in one step, with prompt_logprobs"):
        generate(llm, [random_prompt(0, MAX_SCORED + 2)], [params])
    prompts = [random_prompt(number, length) for number, length in enumerate((MAX_SCORED + 1, 60))]
    for output in generate(llm, prompts, [params] * 2):
        assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids)
