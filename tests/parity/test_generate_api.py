"""`LLM` as its users see it, on a real model with a real tokenizer: prompts, sampling, stops, order, streams, refusals.

The artifact is deterministic, so whatever is served together, a request's tokens are those that it gets alone.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from drawn import in_one_of
from tiny import TINY
from tiny_checkpoint import MAX_SEQ_LEN
from tokenizers import decoders, pre_tokenizers, trainers

from ingot import LLM, BeamSearchParams, SamplingParams, compile_model
from ingot.ir.errors import IngotError, OptionError, RequestError
from ingot.runtime.engines.outputs import RequestOutput

# One worker, for the models that tests share.
pytestmark = [pytest.mark.xdist_group("generate-api"), pytest.mark.one_in_file(3)]

NAME = "qwen3-plain"
BOS, EOS = 1, 2
TEXT = "def write(self, folder):\n    return folder  # été 🙂\n"
CORPUS = """Each request owns a row of state on the device: its last token and its position. A step reads them first and
moves them last, so the next step needs nothing from the host. When a sequence that decodes needs a page and none is
left, the sequence that was admitted last gives up its pages, goes back to the front of the queue and is computed again
later, outputs included. The running sequences always arrived before the waiting ones, and none starves.
"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with as many tokens as the model; ids 0, 1 and 2 are special."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY[NAME].config["vocab_size"],
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT, CORPUS] * 3, trainer)
    assert made.get_vocab_size() == TINY[NAME].config["vocab_size"]
    return made


@pytest.fixture(scope="session")
def bare(artifact: Callable[..., Path]) -> LLM:
    """The model without a tokenizer."""
    return LLM(artifact(NAME, backend="reference", deterministic=True))


@pytest.fixture(scope="session")
def speaking(backend: tokenizers.Tokenizer, bare: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model's artifact with the tokenizer. Its generation_config.json names as a second end token one that it
    says greedily after TEXT."""
    folder = TINY[NAME].write(tmp_path_factory.mktemp("speaking") / NAME)
    said = bare.generate({"prompt_token_ids": backend.encode(TEXT).ids}, GREEDY)[0].outputs[0].token_ids
    end = next(token for place, token in enumerate(said) if place >= 3 and token > EOS and token not in said[:place])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [EOS, end], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9})
    )
    output = tmp_path_factory.mktemp("artifact") / "speaking.ingot"
    compile_model(folder, output, backend="reference", deterministic=True, max_batch=8, max_tokens=256, jobs=1)
    return output


@pytest.fixture(scope="session")
def llm(speaking: Path) -> LLM:
    return LLM(speaking)


def only(outputs: list[RequestOutput]) -> Any:
    """The one sequence of the one request."""
    ((output,),) = ([request.outputs for request in outputs],)
    (sequence,) = output
    return sequence


def test_text_is_the_tokens_decoded(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    prompts = [TEXT, "import os", "é", "🙂"]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert output.prompt == prompt and output.prompt_token_ids == backend.encode(prompt).ids
        sequence = output.outputs[0]
        assert len(sequence.token_ids) == 32 and sequence.finish_reason == "length" and output.finished
        assert sequence.text == backend.decode(sequence.token_ids)


def test_prompt_forms_are_equal(llm: LLM, backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode(TEXT).ids
    forms: list[Any] = [TEXT, {"prompt": TEXT}, {"prompt_token_ids": ids}, ids, tuple(ids)]
    together = llm.generate(forms, GREEDY)
    assert [output.prompt for output in together] == [TEXT, TEXT, None, None, None]
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 1
    for form in forms[:3]:  # one prompt, not in a list
        assert only(llm.generate(form, GREEDY)) == together[0].outputs[0]


def test_outputs_come_in_the_order_of_prompts(llm: LLM) -> None:
    # More than fit into a step, of different lengths, so that they end in another order than they came.
    prompts = [{"prompt_token_ids": [7 + index] * (1 + 5 * index % 17)} for index in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=20 - index, ignore_eos=True) for index in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20 - index for index in range(12)]
    ids = [int(output.request_id) for output in outputs]
    assert ids == sorted(ids)


def test_mixed_sampling_parameters_keep_apart(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.5, top_k=5, seed=2, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.5, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, min_p=0.2, seed=4, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=5.0, top_k=1, max_tokens=12, ignore_eos=True),
    ]
    together = llm.generate([TEXT] * len(params), params)
    for output, one in zip(together, params, strict=True):
        assert output.outputs == llm.generate(TEXT, one)[0].outputs
    assert together[5].outputs[0].token_ids == together[0].outputs[0].token_ids, "top_k=1 is greedy"


def test_seeds_reproduce_whatever_is_served_beside(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [index + 5, index + 90]} for index in range(6)]
    params = [SamplingParams(temperature=1.0, seed=index, max_tokens=24, ignore_eos=True) for index in range(6)]
    alone = [only(llm.generate(prompt, one)).token_ids for prompt, one in zip(prompts, params, strict=True)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    backwards = [output.outputs[0].token_ids for output in llm.generate(prompts[::-1], params[::-1])]
    assert together == alone == backwards[::-1]
    other = llm.generate(prompts[0], SamplingParams(temperature=1.0, seed=99, max_tokens=24, ignore_eos=True))
    assert only(other).token_ids != alone[0]


def test_without_seeds_the_llms_own_seed_decides(speaking: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    said = []
    for seed in (0, 0, 1):
        llm = LLM(speaking, seed=seed)
        said.append([output.outputs[0].token_ids for output in llm.generate([TEXT, TEXT], params)])
    assert said[0] == said[1] != said[2]
    assert said[0][0] != said[0][1], "two requests without a seed draw alike"


def test_n_sequences_have_seeds_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=10, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate(TEXT, params)
    assert [sequence.index for sequence in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sequence.token_ids) for sequence in output.outputs}) == 4
    for index, sequence in enumerate(output.outputs):
        one = SamplingParams(temperature=1.0, seed=10 + index, max_tokens=16, ignore_eos=True)
        assert sequence.token_ids == only(llm.generate(TEXT, one)).token_ids


def test_end_tokens(llm: LLM) -> None:
    plain = only(llm.generate(TEXT, GREEDY))
    assert plain.finish_reason == "length"
    ended = only(llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=24)))
    place = next(place for place, token in enumerate(plain.token_ids) if token in llm.get_tokenizer().eos_token_ids)
    assert 3 <= place < 23 and ended.token_ids == plain.token_ids[: place + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert plain.text.startswith(ended.text)
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids[:-1])


def test_stop_token_ids(llm: LLM) -> None:
    plain = only(llm.generate(TEXT, GREEDY))
    stop = plain.token_ids[9]
    first = plain.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    ended = only(llm.generate(TEXT, params))
    assert ended.token_ids == plain.token_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: LLM, include: bool) -> None:
    params = dict(temperature=0.8, seed=21, max_tokens=60, ignore_eos=True)
    plain = only(llm.generate(TEXT, SamplingParams(**params)))
    # Across the border of two tokens, so that it is complete only with the second.
    decode = llm.get_tokenizer().decode
    place = next(
        place
        for place in range(6, 50)
        if decode(plain.token_ids[:place]) + decode(plain.token_ids[place:]) == plain.text
        and (cut := len(decode(plain.token_ids[:place])))
        and plain.text[cut - 1 : cut + 1].isascii()
        and plain.text.find(plain.text[cut - 1 : cut + 1]) == cut - 1
    )
    cut = len(decode(plain.token_ids[:place]))
    stop = plain.text[cut - 1 : cut + 1]
    ended = only(
        llm.generate(TEXT, SamplingParams(**params, stop=["never said ☃", stop], include_stop_str_in_output=include))
    )
    assert ended.text == plain.text[: cut + 1 if include else cut - 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.token_ids == plain.token_ids[: place + 1], "honoured one step late, and the surplus dropped"


def test_streams_grow_to_what_generate_gives(llm: LLM) -> None:
    prompts, params = [TEXT, "import os"], SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True)
    expected = llm.generate(prompts, params)
    seen: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(prompts, params):
        seen.setdefault(output.request_id, []).append(output)
    for outputs, whole in zip([seen[key] for key in sorted(seen, key=int)], expected, strict=True):
        assert len(outputs) == 20 and [output.finished for output in outputs] == [False] * 19 + [True]
        for before, after in itertools.pairwise(outputs):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert after.outputs[0].token_ids[:-1] == before.outputs[0].token_ids
        assert outputs[-1].outputs == whole.outputs


class Counted(dict):  # type: ignore[type-arg]
    looks = 0

    def __getitem__(self, key: str) -> Any:
        self.looks += 1
        return super().__getitem__(key)


def test_a_step_looks_for_no_request_that_has_nothing_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(llm, "_waiting", counted)
    assert len(llm.generate([TEXT] * 12, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))) == 12
    assert counted.looks == 12


def test_leaving_a_stream_frees_what_it_held(llm: LLM) -> None:
    expected = only(llm.generate(TEXT, GREEDY))
    stream: Iterator[RequestOutput] = llm.stream([TEXT] * 3, SamplingParams(temperature=1.0, max_tokens=60))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert only(llm.generate(TEXT, GREEDY)) == expected
    scheduler = llm._engine._scheduler
    assert not scheduler.requests and scheduler.pages.pools[0].num_held == 0


def test_max_tokens_none_goes_to_the_end(llm: LLM) -> None:
    output = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == MAX_SEQ_LEN
    assert output.outputs[0].finish_reason == "length"


def test_default_sampling_parameters_are_the_models(llm: LLM, bare: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=9)
    assert bare.get_default_sampling_params() == SamplingParams()
    assert len(only(llm.generate(TEXT)).token_ids) <= 9


def test_beams_have_the_text_of_prompt_and_output(llm: LLM) -> None:
    tokenizer, reasons = llm.get_tokenizer(), set()
    assert tokenizer is not None
    for included in (False, True):
        params = BeamSearchParams(6, 14, length_penalty=0.0, include_stop_str_in_output=included)
        for one in llm.beam_search(TEXT, params)[0].sequences:
            reasons.add(one.finish_reason)
            tokens = one.tokens[:-1] if one.finish_reason == "stop" and not included else one.tokens
            assert one.text == tokenizer.decode(tokens, skip_special_tokens=False)
            assert one.text is not None and TEXT in one.text
    assert "stop" in reasons


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt is empty"),
        ({"prompt_token_ids": []}, GREEDY, "prompt is empty"),
        ({"prompt_token_ids": [3, 383]}, GREEDY, "token id 383 is out of range"),
        ({"prompt_token_ids": [-1]}, GREEDY, "token id -1 is out of range"),
        ({"prompt_token_ids": [3] * MAX_SEQ_LEN}, GREEDY, f"prompt has {MAX_SEQ_LEN} tokens"),
        ({"text": "a"}, GREEDY, "keys"),
        ([3, 4, 5], GREEDY, "prompt of type int"),
        (TEXT, [GREEDY, GREEDY], "2 sampling params for 1 prompts"),
        (TEXT, SamplingParams(stop_token_ids=[383]), "stop token id 383"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    expected = only(llm.generate(TEXT, GREEDY))
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    if not isinstance(params, list) and not isinstance(prompts, list):
        with pytest.raises(RequestError, match=message):  # all or none
            llm.generate([TEXT, prompts], [GREEDY, params])
    assert not llm._engine.has_unfinished()
    assert only(llm.generate(TEXT, GREEDY)) == expected


def test_without_a_tokenizer_token_ids_work_and_text_is_refused(
    bare: LLM, llm: LLM, backend: tokenizers.Tokenizer
) -> None:
    assert bare.get_tokenizer() is None
    ids = backend.encode(TEXT).ids
    said = only(bare.generate({"prompt_token_ids": ids}, GREEDY))
    assert said.text == "" and said.token_ids == only(llm.generate(TEXT, GREEDY)).token_ids
    for prompt in (TEXT, {"prompt": TEXT}):
        with pytest.raises(RequestError, match="without a tokenizer"):
            bare.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match="stop strings"):
        bare.generate({"prompt_token_ids": ids}, SamplingParams(stop="a"))
    # config.json's end token holds without a tokenizer too.
    assert bare._engine._eos_ids == {EOS}


def test_options_of_an_artifact_are_checked(speaking: Path) -> None:
    with pytest.raises(OptionError, match="takes no option 'backend'"):
        LLM(speaking, backend="reference")
    for option in ("max_num_seqs", "max_num_batched_tokens"):
        for value in (0, 10**6):
            with pytest.raises(OptionError, match=option):
                LLM(speaking, **{option: value})


def test_priorities_and_salts(speaking: Path, llm: LLM) -> None:
    urgent = LLM(speaking, scheduling_policy="priority", max_num_seqs=1)
    prompts: list[Any] = [TEXT, {"prompt": TEXT, "cache_salt": "of another tenant"}, "x"]
    ended = [out.request_id for out in urgent.stream(prompts, GREEDY, priority=[3, -1, 0]) if out.finished]
    assert ended == ["1", "2", "0"]
    assert urgent.prefix_cache_stats.hits == 0, "one prompt, two salts"
    (again,) = urgent.generate({"prompt": TEXT, "cache_salt": "of another tenant"}, GREEDY)
    assert again.num_cached_tokens and again.outputs == llm.generate(TEXT, GREEDY)[0].outputs
    for priority, message in (([1], "1 priorities for 2"), ([0, 0.5], "0.5"), ([True, 0], "True"), (1, "type int")):
        with pytest.raises(RequestError, match=message):
            urgent.generate(["a", "b"], GREEDY, priority=priority)
    with pytest.raises(RequestError, match='priority 1 with the scheduling policy "fcfs"'):
        llm.generate("a", GREEDY, priority=[1])
    for options, message in (
        ({"scheduling_policy": "lifo"}, "policy is 'lifo'"),
        ({"enable_prefix_caching": "no"}, "'no'"),
    ):
        with pytest.raises(OptionError, match=message):
            LLM(speaking, **options)


@in_one_of(3)
def test_a_checkpoint_is_compiled_once_in_a_child_process(
    checkpoint: Callable[[str], Path], bare: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    prompt = {"prompt_token_ids": [5, 6, 7]}
    options: dict[str, Any] = dict(backend="reference", deterministic=True, max_batch=4, max_tokens=64)
    first = LLM(checkpoint(NAME), **options)
    assert only(first.generate(prompt, GREEDY)).token_ids == only(bare.generate(prompt, GREEDY)).token_ids

    def state() -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, files in os.walk(tmp_path / "cache" / "artifacts"):
            for file in files:
                if not file.endswith(".lock"):
                    status = (Path(folder) / file).stat()
                    found[f"{folder}/{file}"] = status.st_ino, status.st_mtime_ns
        return found

    compiled = state()
    (artifact,) = (tmp_path / "cache" / "artifacts").glob("*.ingot")
    again = LLM(checkpoint(NAME), **options)
    assert state() == compiled, "the second start compiled"
    assert again._loaded.artifact.folder == artifact
    assert LLM(artifact)._loaded.artifact.build_id == first._loaded.artifact.build_id


@pytest.mark.slow
def test_errors_of_the_child_process_come_through(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OptionError, match="no_such_option"):
        LLM(checkpoint(NAME), no_such_option=1)
    broken = TINY[NAME].write(tmp_path / "broken", num_hidden_layers=4)
    (broken / "model.safetensors").write_bytes((checkpoint(NAME) / "model.safetensors").read_bytes())
    with pytest.raises(IngotError, match=r"layers\.3"):
        LLM(broken, backend="reference")
    assert not list((tmp_path / "cache" / "artifacts").glob("*.ingot"))
