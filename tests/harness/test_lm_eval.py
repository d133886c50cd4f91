"""lm-eval with Ingot's model in process and over HTTP: equal to its model of transformers in float32.

The tests that evaluate need lm-eval with its extras "api" and "hf": pip install "lm-eval[api,hf]". They are skipped
without it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer

from ingot.cli.main import INGOT, run
from ingot.ir.errors import OptionError

PICO = Path(__file__).parents[2] / "models" / "pico"
SOURCE = Path(json.__file__).with_name("decoder.py")
TASKS = ["tiny_choice", "tiny_answer", "tiny_text"]
# A log-probability of float32 has some 7 digits; transformers sums them in float32 too.
RELATIVE = 1e-6


def test_without_lm_eval_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run(INGOT, ["eval", "some.ingot", "--tasks", "arc_easy"]) == OptionError.exit_code
    assert "pip install lm-eval" in capsys.readouterr().err
    assert run(INGOT, ["eval", "--tasks", "arc_easy"]) == OptionError.exit_code
    assert "Usage: ingot eval MODEL" in capsys.readouterr().err  # the model comes first


def test_arguments_are_passed_to_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    from ingot.harness import run_lm_eval

    seen: list[list[str]] = []
    main = ModuleType("lm_eval.__main__")
    main.cli_evaluate = lambda: seen.append(sys.argv[:])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", main)
    monkeypatch.setattr(run_lm_eval, "register", lambda: None)
    before = sys.argv[:]
    assert run(INGOT, ["eval", "a,b.ingot", "--tasks", "x", "y", "--limit", "3", "--model_args", "max_num_seqs=4"]) == 0
    given = ["lm-eval", "run", "--model", "ingot", "--model_args", "pretrained='a,b.ingot'", "--tasks", "x", "y"]
    assert seen == [[*given, "--limit", "3", "--model_args", "max_num_seqs=4"]] and sys.argv == before


def write_tasks(folder: Path) -> Path:
    """Three tasks about lines of a module: choose the end of a line, continue a line, and the likelihood of parts."""
    lines = [line.strip() for line in SOURCE.read_text().splitlines() if len(line.strip()) > 30]
    choices = [
        {"question": line[:14], "choices": [line[14:], lines[i - 1][14:], lines[i - 2][14:]], "answer": 0}
        for i, line in enumerate(lines[:16])
    ]
    answers = [{"question": line[:16], "answer": line[16:]} for line in lines[20:28]]
    texts = [{"text": "\n".join(lines[i : i + 3 + i % 4])} for i in range(0, 24, 4)]
    kinds = {
        "choice": (choices, "multiple_choice", "doc_to_choice: choices\n", ["acc", "acc_norm"]),
        "answer": (answers, "generate_until", 'generation_kwargs: {until: ["\\n", ")"], max_gen_toks: 20}\n', []),
        "text": (texts, "loglikelihood_rolling", "", ["byte_perplexity", "bits_per_byte"]),
    }
    for name, (documents, output_type, more, metrics) in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        target = "'{{text}}'" if name == "text" else "answer"
        task = f"""\
            task: tiny_{name}
            dataset_path: json
            dataset_kwargs: {{data_files: {{test: {data}}}}}
            test_split: test
            output_type: {output_type}
            target_delimiter: ''
            doc_to_text: '{"" if name == "text" else "{{question}}"}'
            doc_to_target: {target}
            metric_list: {[{"metric": metric} for metric in metrics or ["exact_match"]]}
            """
        (folder / f"{name}.yaml").write_text(textwrap.dedent(task) + more)
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ingot import compile_model

    made = tmp_path_factory.mktemp("harness") / "pico.ingot"
    compile_model(PICO, made, target="cpu", backend="reference", dtype="float32", jobs=1, max_batch=8, max_tokens=256)
    return made


def evaluated(model: str, model_args: dict[str, Any], tasks: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The metrics by task, as lm-eval prints them, and the answers of the model to each document."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model=model, model_args=model_args, tasks=TASKS, task_manager=manager, bootstrap_iters=0)
    metrics = {
        f"{task} {name}": f"{value:.4f}"
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    return metrics, {task: [one["resps"] for one in found["samples"][task]] for task in TASKS}


def equal(found: Any, wanted: Any) -> bool:
    """Texts and flags are equal, and log-likelihoods to the digits of float32."""
    if isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    return bool(found == pytest.approx(wanted, rel=RELATIVE) if isinstance(found, float) else found == wanted)


@pytest.mark.slow
def test_equal_to_transformers_in_process_and_over_http(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from ingot.harness.run_lm_eval import register

    register()
    tasks = write_tasks(tmp_path)
    wanted, answers = evaluated("hf", {"pretrained": str(PICO), "dtype": "float32", "device": "cpu"}, tasks)
    assert len(wanted) >= 5
    metrics, own = evaluated("ingot", {"pretrained": str(artifact)}, tasks)
    assert metrics == wanted
    assert all(equal(own[task], answers[task]) for task in TASKS)
    server = HttpServer(artifact, tmp_path / "log")
    try:
        url = f"{server.url}/v1/completions"
        options = {"model": "pico", "base_url": url, "tokenizer": str(PICO), "max_length": 2046, "num_concurrent": 4}
        metrics, other = evaluated("local-completions", options, tasks)
        assert server.stop() == 0
    finally:
        server.close()
    assert metrics == wanted
    assert [equal(other[task], own[task]) for task in TASKS] == [True] * 3


@pytest.mark.slow
def test_the_model_of_a_harness(artifact: Path) -> None:
    """Long contexts and texts lose their first tokens, and each token of a long text is predicted once."""
    pytest.importorskip("lm_eval")
    from types import SimpleNamespace

    from ingot.harness.lm_eval_model import IngotLM

    model = IngotLM(str(artifact), max_length=40, batch_size=3, device="cpu")
    tokenizer = model._tokenizer
    assert (model.prefix_token_id, model.eot_token_id, model.max_length) == (0, 0, 40)

    def of(*arguments: Any) -> list[Any]:
        return [SimpleNamespace(args=one) for one in arguments]

    text = SOURCE.read_text()[:1500]
    (rolled,) = model.loglikelihood_rolling(of((text,)))
    tokens = [0, *tokenizer.encode(text)]
    parts = []
    for start in range(1, len(tokens), 40):  # as lm-eval cuts: 40 predicted tokens, and the last window reaches back
        end = min(start + 40, len(tokens))
        parts.append((None, tokens[max(0, end - 41) : start], tokens[start:end]))
    assert rolled == pytest.approx(sum(score for score, _ in model._loglikelihood_tokens(parts)), rel=1e-6)
    long, short = model.loglikelihood(of((text, "    return"), (tokenizer.decode(tokens[-36:]), "    return")))
    assert long[0] == pytest.approx(short[0], abs=2.0) and long[0] < 0 > short[0]
    (greedy,) = model.generate_until(of(("def fibonacci(n):", {"until": ["\n\n"], "max_gen_toks": 12})))
    (score,) = model.loglikelihood(of(("def fibonacci(n):", greedy)))
    assert greedy and score[1], "greedy decoding returns its own answer"
    with pytest.raises(Exception, match="max_gen_toks is 5000"):
        model.generate_until(of(("a", {"max_gen_toks": 5000})))
    with pytest.raises(OptionError, match="max_length is 0"):
        IngotLM(str(artifact), max_length=0)
