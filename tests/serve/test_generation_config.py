"""The sampling defaults of requests: the model's, those of a folder, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot import AsyncLLM, SamplingParams
from ingot.ir.errors import ArtifactError, OptionError

pytestmark = pytest.mark.xdist_group("serve")


def defaults(artifact: Path, source: str) -> SamplingParams:
    return AsyncLLM(artifact, generation_config=source).model.defaults


def test_defaults_of_a_folder_of_the_model_and_none(chat_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "do_sample": True}))
    assert defaults(chat_artifact, str(tmp_path)) == SamplingParams(temperature=0.25, top_k=7)
    assert defaults(chat_artifact, "none") == defaults(chat_artifact, "vllm") == SamplingParams()
    assert defaults(chat_artifact, "auto") == AsyncLLM(chat_artifact).model.defaults


def test_bad_sources(chat_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--generation-config is 'nowhere'"):
        defaults(chat_artifact, "nowhere")
    file = tmp_path / "generation_config.json"
    for text in ("[", "[1]", '{"temperature": -1}', '{"top_k": "many"}'):
        file.write_text(text)
        with pytest.raises(ArtifactError, match=r"generation_config\.json"):
            defaults(chat_artifact, str(tmp_path))
