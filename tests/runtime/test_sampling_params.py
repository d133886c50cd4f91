import dataclasses
import math

import numpy as np
import pytest

from ingot.ir.errors import RequestError
from ingot.runtime.params.sampling_checks import CHECKS, UNSUPPORTED
from ingot.runtime.params.sampling_params import _DEFAULTS, SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.max_tokens) == (None, (), (), 16)
    assert params.detokenize and params.skip_special_tokens and params.spaces_between_special_tokens
    assert not params.ignore_eos and not params.include_stop_str_in_output and params.min_tokens == 0
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    assert params.logprobs is None and params.prompt_logprobs is None and not params.penalizes


def test_normal_forms():
    params = SamplingParams(
        top_k=-1, seed=-1, stop="end", stop_token_ids=[np.int64(3)], temperature=1, top_p=np.float32(0.5)
    )
    assert params.top_k == 0 and params.seed is None and params.stop == ("end",) and params.stop_token_ids == (3,)
    assert type(params.temperature) is float and type(params.top_p) is float and type(params.stop_token_ids[0]) is int
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b") and SamplingParams(max_tokens=None).max_tokens is None


def test_frozen_and_replaceable():
    params = SamplingParams(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
    assert dataclasses.replace(params, seed=4) == SamplingParams(seed=4)
    assert hash(params) == hash(SamplingParams(seed=3))


def test_greedy():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    with pytest.raises(RequestError, match="n = 2"):
        SamplingParams(temperature=0, n=2)


BAD = {
    "n": [0, -1, 16385, 1.0, True, "1", None],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, "1", True, None, 1e39, 10**400, 1j],
    "top_p": [0, 0.0, -0.1, 1.0001, math.nan, math.inf, True, "x"],
    "top_k": [-2, 1.5, 2.0, True, math.nan, "1", 2**31, None],
    "min_p": [-0.1, 1.1, math.nan, math.inf, False, None],
    "typical_p": [0, -0.1, 1.0001, math.nan, True, "x", None],
    "seed": [-2, 2**63, 1.0, True, "0"],
    "logit_bias": [
        3,
        [3],
        {3: math.nan},
        {3: math.inf},
        {3: 1e7},
        {3: "1"},
        {"3": 1.0},
        {-1: 1.0},
        {2**31: 1.0},
        {True: 1.0},
    ],
    "allowed_token_ids": [3, "3", [], (), [-1], [1.0], [True], [2**31], [None]],
    "bad_words": ["a", [""], ["a", " "], 3, [3], {"a": 1}],
    "structured_outputs": [3, "json", ["json"]],
    "stop": ["", [""], ["a", ""], 3, [3], b"a", {"a": 1}],
    "stop_token_ids": [3, "3", [-1], [1.0], [True], [2**31], [None]],
    "ignore_eos": [1, 0, None, "true"],
    "max_tokens": [0, -1, 1.5, True, math.inf, "16"],
    "min_tokens": [-1, 17, 10**30, True, 0.0, None],  # 17: more than max_tokens
    "repetition_penalty": [0, 0.0, -1.0, 1e-31, 1e31, math.nan, math.inf, True, "1", None, 1j],
    "frequency_penalty": [-2.01, 2.01, math.nan, -math.inf, False, "0", None],
    "presence_penalty": [-2.01, 2.01, math.nan, math.inf, True, "0", None],
    "truncate_prompt_tokens": [0, -2, 1.0, True, "9"],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "prompt_logprobs": [-1, 21, 0.0, False, "0"],
    "detokenize": [1, None],
    "skip_special_tokens": [0, None],
    "spaces_between_special_tokens": ["no"],
    "include_stop_str_in_output": [1],
}


def test_a_huge_dict_is_refused_by_its_size():
    with pytest.raises(RequestError, match="logit_bias has 1025 tokens") as caught:
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.5))
    assert "at most 1024" in caught.value.expected


def test_every_field_has_bad_values():
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_value_names_field_value_and_range(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert name in error.what and error.where == f"SamplingParams.{name}" and error.expected
    assert repr(value)[:20].strip("[]{}") in error.what


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_with_a_reason(name):
    with pytest.raises(RequestError, match=f"{name} = .* is not supported") as caught:
        SamplingParams(**{name: 7})
    assert caught.value.hint == UNSUPPORTED[name].hint
    assert SamplingParams(**{name: UNSUPPORTED[name].neutral}) == SamplingParams()  # it asks for nothing


# vllm/sampling_params.py of vLLM 0.25 and later, and what earlier versions had; `typical_p` is transformers'.
VLLM = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
output_kind stream_interval skip_clone structured_outputs logit_bias allowed_token_ids extra_args bad_words
skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids
typical_p best_of guided_decoding logits_processors truncate_prompt_tokens"""


def test_every_field_of_vllm_is_supported_or_refused():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not names & UNSUPPORTED.keys() and names | UNSUPPORTED.keys() == {*VLLM.split()}


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"frequency_penalty": -2, "presence_penalty": 2},
        {"frequency_penalty": 0, "presence_penalty": np.float32(0.5)},
        {"logprobs": 0, "prompt_logprobs": np.int64(20)},
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
    ],
    ids=str,
)
def test_edges_are_accepted(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.penalizes == any(name.endswith("_penalty") for name in fields)


def test_neutral_penalties_are_off_whatever_their_type():
    params = SamplingParams(presence_penalty=0, frequency_penalty=-0.0, repetition_penalty=1)
    assert params == SamplingParams() and not params.penalizes


def test_unknown_name_and_its_neighbour():
    with pytest.raises(RequestError) as caught:
        SamplingParams(temprature=0.5)
    assert (
        "temprature" in caught.value.what and "'temperature'" in caught.value.hint and "top_p" in caught.value.expected
    )
    with pytest.raises(RequestError) as caught:
        SamplingParams(qqqqqq=1)
    assert caught.value.hint == ""


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop="x", detokenize=False)


def test_long_values_are_cut_in_messages():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["a" * 10_000, ""])
    assert len(str(caught.value)) < 400


def test_every_field_has_a_check_that_keeps_its_default():
    """Defaults are not checked each time they are left: they are in their one form."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(CHECKS) == list(_DEFAULTS)
    assert all(CHECKS[name](name, default) is default for name, default in _DEFAULTS.items())
    assert dataclasses.asdict(SamplingParams()) == _DEFAULTS
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # vLLM's way of saying it
