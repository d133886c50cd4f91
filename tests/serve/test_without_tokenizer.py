"""A model without a tokenizer: token ids in, token ids out, and a reason wherever text is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_world import write_checkpoint
from thread_server import thread_server

from ingot import LLM, SamplingParams, compile_model

pytestmark = pytest.mark.xdist_group("serve")


@pytest.mark.usefixtures("engine_thread")
def test_token_ids_in_and_out(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "bare", tokenizer=False)
    limits = {"max_batch": 4, "max_tokens": 32, "max_seq_len": 64}
    compile_model(checkpoint, tmp_path / "bare.ingot", target="cpu", backend="reference", jobs=1, **limits)
    (expected,) = LLM(tmp_path / "bare.ingot").generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=5))
    with thread_server(tmp_path / "bare.ingot", tmp_path) as server:
        fields = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 5, "logprobs": 0, "echo": True}
        made = server.complete(**fields, return_token_ids=True, return_tokens_as_token_ids=True).json()
        (choice,) = made["choices"]
        assert choice["token_ids"] == list(expected.outputs[0].token_ids) and choice["text"] == ""
        assert choice["logprobs"]["tokens"][:3] == ["token_id:1", "token_id:2", "token_id:3"]
        refused = {
            "/v1/completions": {"prompt": "a"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
            "/v1/responses": {"input": "a"},
            "/v1/responses/input_tokens": {"input": "a"},
            "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in refused.items():
            answer = server.http.post(path, json=body)
            assert answer.status_code == 400 and "tokenizer" in answer.json()["error"]["message"], path
        stops = server.complete(prompt=[1], stop=["a"])
        assert stops.status_code == 400 and "stop strings" in stops.json()["error"]["message"]
