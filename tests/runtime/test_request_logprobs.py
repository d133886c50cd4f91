"""The log-probabilities of a request: their texts, of its prompt, and where it ends early."""

from dataclasses import replace

from served import GREEDY

from ingot.runtime.params.sampling_params import SamplingParams


def test_logprobs_of_text_name_their_tokens(texts, tokenizer):
    served = texts(" two ☃")
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=1)
    served.engine.add_request("r", "go", params)
    output = served.drain()["r"]
    served.check_logprobs(output, params)
    (sequence,) = output.outputs
    chosen = [entry[token].decoded_token for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
    assert chosen[-1] == "<eos>" and "�" in chosen, "a special token, and a part of a character"
    served = texts()
    served.engine.add_request("r", "go", replace(params, detokenize=False))
    assert {one.decoded_token for entry in served.drain()["r"].outputs[0].logprobs for one in entry.values()} == {None}


def test_a_prompt_is_scored_once_for_all_its_sequences(serve):
    served = serve(max_batch=3, max_tokens=7)
    params = SamplingParams(n=4, max_tokens=3, seed=1, logprobs=1, prompt_logprobs=2)
    served.engine.add_request("r", list(range(20)), params)
    served.engine.add_request("s", list(range(9)), replace(params, n=1, logprobs=None))
    last = served.drain()
    served.check_logprobs(last["r"], params)
    served.check_logprobs(last["s"], replace(params, logprobs=None))
    assert served.device.num_scored == 19 + 8


def test_a_token_that_is_none_has_no_logprob(serve):
    served = serve()
    served.device.invalid = lambda context: len(context) == 5
    served.engine.add_request("r", [1, 2, 3], replace(GREEDY, logprobs=1))
    (got,) = served.drain()["r"].outputs
    assert got.finish_reason == "error" and len(got.token_ids) == len(got.logprobs) == 2


def test_an_aborted_request_keeps_the_logprobs_it_has(serve):
    served = serve(max_tokens=6)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, seed=1)
    served.engine.add_request("r", list(range(20)), params)
    for _ in range(3):
        served.step()
    output = served.engine.abort("r")
    assert len(output.prompt_logprobs) == 13  # two steps have retired
    served.check_logprobs(output, params)
    assert served.drain() == {}
