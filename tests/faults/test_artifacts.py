"""Real artifacts, damaged, foreign or wrong: always an IngotError that names the place, never a crash."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resign import Edit, edit_json

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.artifact import CHECKSUMS, OUTSIDE_IDENTITY, SCHEMA_VERSION
from ingot.ir.errors import ArtifactError, ConfigError, IngotError, OptionError, TargetError
from ingot.ir.manifest_file import MANIFEST
from ingot.runtime.artifact import open_artifact
from ingot.runtime.loader import load_artifact
from ingot.runtime.loaders import LOADERS, Loader

# The artifacts that the parity tests compile too, in the worker that has them.
reference = pytest.mark.xdist_group("parity-llama-plain")
inductor = pytest.mark.xdist_group("parity-llama-biased")


@pytest.fixture
def plain(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact of the reference backend, to be damaged."""
    return Path(shutil.copytree(artifact("llama-plain", backend="reference"), tmp_path / "plain.ingot"))


@pytest.fixture
def compiled(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact with executables, to be damaged."""
    return Path(shutil.copytree(artifact("llama-biased", backend="inductor"), tmp_path / "compiled.ingot"))


def files_of(artifact: Path) -> list[Path]:
    return [path for path in sorted(artifact.rglob("*")) if path.is_file()]


def run(artifact: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    LLM(artifact).generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8] * 20}], params)


def refusal(artifact: Path, kind: type[IngotError] = ArtifactError) -> str:
    with pytest.raises(IngotError) as caught:
        run(artifact)
    assert isinstance(caught.value, kind), repr(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- damage ---------------------------------------------------------------------------------------------------------


def put(file: Path, data: bytes) -> None:
    """Replace a file by another: this process may have mapped the one that is there."""
    file.unlink()
    file.write_bytes(data)


def damage_each_file(artifact: Path) -> None:
    run(artifact)
    files = files_of(artifact)
    assert len(files) > 15
    for file in files:
        relpath, original = file.relative_to(artifact).as_posix(), file.read_bytes()
        for position in (0, len(original) // 2, len(original) - 1):
            changed = bytearray(original)
            changed[position] ^= 1
            put(file, changed)
            with pytest.raises(ArtifactError, match=re.escape(relpath)) as caught:
                open_artifact(artifact).verify_files()
            assert caught.value.exit_code == 2
        assert relpath in refusal(artifact)
        for length in (0, len(original) // 2, len(original) - 1):
            put(file, original[:length])
            with pytest.raises(ArtifactError, match=re.escape(relpath)):
                open_artifact(artifact)
        assert relpath in refusal(artifact)
        put(file, original)
    run(artifact)


@reference
def test_each_file_in_turn_with_a_byte_changed_or_cut_short(plain: Path) -> None:
    damage_each_file(plain)


@inductor
def test_each_file_in_turn_with_executables(compiled: Path) -> None:
    assert list(compiled.glob("exe/*/*/*.so"))
    damage_each_file(compiled)


@reference
def test_each_file_in_turn_missing_or_a_link(plain: Path, tmp_path: Path) -> None:
    for file in files_of(plain):
        relpath = file.relative_to(plain).as_posix()
        moved = tmp_path / "moved"
        file.rename(moved)
        assert relpath in refusal(plain)
        file.symlink_to(moved)
        text = refusal(plain)
        assert relpath in text and "link" in text
        file.unlink()
        file.mkdir()
        assert relpath in refusal(plain)
        file.rmdir()
        moved.rename(file)
    run(plain)


@reference
@pytest.mark.parametrize("relpath", ["extra", "weights/00001.safetensors", "exe/cpu/0/region.so", ".hidden"])
def test_a_file_too_many(plain: Path, relpath: str) -> None:
    (plain / relpath).parent.mkdir(parents=True, exist_ok=True)
    (plain / relpath).write_bytes(b"")
    assert f"{relpath}: not listed" in refusal(plain)


@reference
def test_another_schema_version(plain: Path) -> None:
    edit_json(plain, MANIFEST, lambda manifest: manifest.update(schema_version=SCHEMA_VERSION + 1, novelty={}))
    text = refusal(plain)
    assert f"schema version {SCHEMA_VERSION + 1}" in text
    assert f"schema version {SCHEMA_VERSION}, the one" in text


# --- what is something else -----------------------------------------------------------------------------------------


@reference
def test_folders_that_are_no_artifact(plain: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "half.ingot").mkdir()
    (tmp_path / "half.ingot" / CHECKSUMS).write_text("")
    for path in ("empty", "file", "half.ingot", "absent"):
        assert "artifact" in refusal(tmp_path / path)
    with pytest.raises(ArtifactError, match="this is a checkpoint: make one with `compile-model"):
        load_artifact(checkpoint("llama-plain"))
    with pytest.raises(ConfigError, match="this is an artifact: it is compiled already"):
        compile_model(plain, tmp_path / "again.ingot")
    with pytest.raises(OptionError, match="takes no option 'backend'"):
        LLM(plain, backend="reference")
    assert not (tmp_path / "again.ingot").exists()


@reference
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_pages": 0},
        {"num_kv_pages": -1},
        {"num_kv_pages": True},
        {"num_kv_pages": "8"},
        {"num_kv_pages": 1 << 40},
        {"num_kv_pages": 1 << 80},
        {"max_num_seqs": 0},
        {"max_num_seqs": 9},
        {"max_num_seqs": "2"},
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 1 << 40},
        {"max_num_batched_tokens": 1.5},
    ],
    ids=str,
)
def test_options_of_loading_that_cannot_be_met(plain: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        LLM(plain, **options)


# --- another machine ------------------------------------------------------------------------------------------------

FOREIGN: dict[str, tuple[Edit, str]] = {
    "name": (lambda m: m["target"].update(name="H200"), "name: H200 against cpu"),
    "device": (
        lambda m: m["target"].update(device="cuda"),
        "compiled for a GPU, cpu, and this machine has no GPU|name: cpu against sm_",
    ),
    "arch": (lambda m: m["target"].update(arch="riscv64"), "arch: riscv64 against"),
    "sm": (lambda m: m["target"].update(sm=90), "sm: 90 against None"),
    "features": (lambda m: m["target"]["features"].append("avx1024"), "features: .*avx1024"),
    "feature missing": (lambda m: m["target"]["features"].clear(), r"features: \[\] against"),
    "torch": (lambda m: m["versions"].update(torch="2.10.0"), r"versions\.torch: 2\.10\.0 against"),
    "another library": (lambda m: m["versions"].update(cuda="13.0"), r"versions\.cuda: 13\.0 against missing"),
    "no version": (lambda m: m["versions"].clear(), r"versions\.torch: missing against"),
    "a field missing": (lambda m: m["target"].pop("arch"), "arch: missing against"),
    "a field too many": (lambda m: m["target"].update(vendor="x"), "vendor: x against missing"),
    "a wrong type": (lambda m: m["target"].update(features="avx512"), "features: avx512 against"),
}

_opened: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The paths that Python opens during a test."""
    global _opened
    if not getattr(sys, "_ingot_watches_opens", False):
        sys.addaudithook(_watch)  # stays as long as the process
        sys._ingot_watches_opens = True  # type: ignore[attr-defined]
    _opened = []
    yield _opened
    _opened = None


@inductor
@pytest.mark.parametrize("field", FOREIGN)
def test_an_artifact_for_another_target(
    compiled: Path, field: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not(*arguments: object) -> Any:
        raise AssertionError("an executable was loaded")

    edit, message = FOREIGN[field]
    edit_json(compiled, MANIFEST, edit)
    monkeypatch.setitem(LOADERS, "inductor", Loader(executable=must_not))
    times = []
    opened.clear()
    for _ in range(5):
        begin = time.perf_counter()
        with pytest.raises(TargetError, match=message) as caught:
            load_artifact(compiled)
        times.append(time.perf_counter() - begin)
    assert caught.value.exit_code == 2
    assert min(times) < 0.1
    inside = {Path(path).relative_to(compiled).as_posix() for path in opened if path.startswith(str(compiled))}
    assert inside <= {MANIFEST, CHECKSUMS, *OUTSIDE_IDENTITY}


# --- wrong content with right digests -------------------------------------------------------------------------------


def first(plan: Any, target: str) -> Any:
    """The first instruction whose target begins so, in the bucket class for many tokens, where regions are."""
    return next(one for one in plan["buckets"][-1]["instructions"] if one["target"].startswith(target))


def value(plan: Any, kind: str = "ingot.embedding") -> Any:
    return plan["buckets"][-1]["values"][first(plan, kind)["results"][0]]


def duplicate(plan: Any) -> None:
    plan["buckets"][0]["values"]["embed.weight"] = {"type": "f32[T]", "buffer": "pool"}


def swap(plan: Any) -> None:
    instructions = plan["buckets"][0]["instructions"]
    instructions[0], instructions[-1] = instructions[-1], instructions[0]


def free_param(plan: Any) -> None:
    first(plan, "ingot.embedding")["frees"] = ["embed.weight"]


def cut_output(plan: Any) -> None:
    plan["buckets"][0].update(instructions=plan["buckets"][0]["instructions"][:3], ending=3)


WRONG_PLANS: dict[str, tuple[Edit, str]] = {
    "no field": (lambda p: p.pop("buckets"), "plan.json is malformed: positions.all.plans.main.buckets"),
    "a field too many": (lambda p: p.update(novel=1), "plan.json is malformed: positions.all.plans.main.novel"),
    "a wrong type": (lambda p: p.update(inputs=[]), "plan.json is malformed: positions.all.plans.main.inputs"),
    "no bucket": (lambda p: p.update(buckets=[]), "no bucket class"),
    "no instruction": (lambda p: p["buckets"][0].update(instructions=[], ending=0), "the output .* is"),
    "no values": (lambda p: p["buckets"][0].update(values={}), "the result is"),
    "a bucket for no step": (
        lambda p: p["buckets"][0]["bucket"].update(tokens=[5, 4]),
        "no bucket class of main holds",
    ),
    "an unknown op": (lambda p: first(p, "ingot.embedding").update(target="ingot.embed"), "the op is unknown"),
    "an op of python": (lambda p: first(p, "ingot.embedding").update(target="os.system"), "the op is unknown"),
    "an op of aten": (lambda p: first(p, "ingot.rms_norm").update(target="aten.exp.default"), "the op is unknown"),
    "an unknown provider": (lambda p: first(p, "ingot.linear").update(provider="cudnn"), "the provider is 'cudnn'"),
    "an unknown executable": (lambda p: first(p, "ingot.linear").update(target="exe.0"), "the executable is unknown"),
    "an unknown value": (lambda p: first(p, "ingot.linear")["args"][0].update(ref="nothing"), "'nothing' is read"),
    "a value used too early": (swap, "is read"),
    "an unknown result": (lambda p: first(p, "ingot.linear").update(results=["nothing"]), "the result is 'nothing'"),
    "results too many": (lambda p: first(p, "ingot.rms_norm")["results"].append(""), "it yields 2 values"),
    "results too few": (lambda p: first(p, "ingot.feed")["results"].pop(), "it yields 3 values"),
    "a param freed": (free_param, "'embed.weight' is freed"),
    "an unknown free": (lambda p: first(p, "ingot.linear").update(frees=["nothing"]), "'nothing' is freed"),
    "an output never made": (cut_output, "the output '.*' is"),
    "no output tokens": (lambda p: p["outputs"].pop("tokens"), "the output 'tokens' is missing"),
    "no log-probabilities": (lambda p: p["outputs"].pop("ranks"), "the output 'ranks' is missing"),
    "too few log-probabilities": (
        lambda p: p["outputs"].update(logprobs="f32[L, 20]"),
        r"the output 'logprobs' is f32\[L, 20\]",
    ),
    "wider logits than are declared": (
        lambda p: p["outputs"].update(logits=p["outputs"]["logits"].replace("f32", "bf16")),
        r"the output 'logits' is f32\[L, ",
    ),
    "no bans": (lambda p: p["inputs"].pop("banned"), "the input 'banned' is missing"),
    "an input of the device's own": (
        lambda p: p["inputs"].update(positions="i32[T]"),
        "the input 'positions' is declared by no feature",
    ),
    "no ending": (lambda p: p.pop("ending"), r"malformed: positions\.all\.plans\.main\.ending"),
    "an ending that does not read": (lambda p: p.update(ending="sample("), r"the ending 'sample\(' does not read"),
    "an unknown ending": (lambda p: p.update(ending="pool"), "unknown ending 'pool'"),
    "an ending of other outputs": (lambda p: p.update(ending="verify(drafted=2)"), "the output 'rejected' is missing"),
    "an ending's unknown number": (lambda p: p.update(ending="sample(drafted=2)"), "the attribute 'drafted'"),
    "an ending's unknown feature": (lambda p: p.update(ending="sample(colour)"), "the feature 'colour'"),
    "an ending behind the last instruction": (
        lambda p: p["buckets"][0].update(ending=1 + len(p["buckets"][0]["instructions"])),
        "the ending begins at instruction",
    ),
    "an ending in front of the first": (
        lambda p: p["buckets"][0].update(ending=-1),
        r"malformed: positions\.all\.plans\.main\.buckets",
    ),
    "an unknown update": (lambda p: first(p, "ingot.kv_append").update(updates=["kv.99"]), "'kv.99' is updated"),
    "another update": (lambda p: first(p, "ingot.kv_append").update(updates=["position"]), "it updates"),
    "an argument missing": (lambda p: first(p, "ingot.linear")["args"].pop(), "arguments do not fit"),
    "an argument too many": (lambda p: first(p, "ingot.linear").update(kwargs={"x": 1}), "arguments do not fit"),
    "a constant for a tensor": (lambda p: first(p, "ingot.linear")["args"].__setitem__(1, 7), "'weight' is 7"),
    "a tensor for a constant": (
        lambda p: first(p, "ingot.rms_norm")["kwargs"].update(eps={"ref": "norm.weight"}),
        "the argument 'eps' refers to",
    ),
    "a text for a number": (lambda p: first(p, "ingot.feed")["kwargs"].update(page_size="x"), "'page_size' is 'x'"),
    "an unknown dtype": (lambda p: first(p, "ingot.rms_norm")["kwargs"].update(eps={"dtype": "f7"}), "dtype is 'f7'"),
    "a page of no tokens": (lambda p: first(p, "ingot.feed")["kwargs"].update(page_size=0), "ingot.feed failed"),
    "a name twice": (duplicate, "stands for two things"),
    "an unknown input": (lambda p: p["inputs"].update(novel="i32[T]"), "the input 'novel'"),
    "an input of another type": (lambda p: p["inputs"].update(tokens="i64[T]"), "the input 'tokens' is i64"),
    "a type that does not read": (lambda p: value(p).update(type="f32[T, "), "does not read"),
    "an unknown dtype of a value": (lambda p: value(p).update(type="f31[T, 75]"), "does not read: unknown dtype"),
    "a negative size": (lambda p: value(p).update(type="f32[T, -75]"), "does not read: size -75"),
    "an unknown symbol": (lambda p: value(p).update(type="f32[Q, 75]"), "does not read"),
    "a value of another shape": (lambda p: value(p).update(type="f32[T, 76]"), "ingot.embedding yields shape"),
    "a value of another dtype": (lambda p: value(p).update(type="f16[T, 75]"), "ingot.embedding yields dtype"),
    "a weight of another shape": (lambda p: p["params"].update({"norm.weight": "f32[76]"}), "'norm.weight' has shape"),
    "a weight of another dtype": (lambda p: p["params"].update({"norm.weight": "bf16[75]"}), "'norm.weight' has dtype"),
    "a weight with a symbol": (lambda p: p["params"].update({"norm.weight": "f32[T]"}), "has the dim T"),
    "a weight that is not there": (lambda p: p["params"].update(novel="f32[1]"), "'novel' is missing"),
    "a state with a step's dim": (lambda p: p["states"]["position"].update(type="i32[B]"), "has the dim B"),
    "a state too large": (lambda p: p["states"]["position"].update(type=f"i32[S, {1 << 50}]"), r"states is \d+"),
    "a state beyond counting": (lambda p: p["states"]["position"].update(type=f"i32[{1 << 90}]"), r"states is \d+"),
    "more memory than there is": (
        lambda p: p["buckets"][0]["memory"].update(activations=1 << 60),
        "do not fit into memory: of .* the activations 11529",
    ),
    "a peak that no instruction has": (lambda p: p["buckets"][0]["memory"].update(peak=10**6), "the peak is at"),
    "other pages in the memory": (lambda p: p["memory"].update(page=7), "page is 7"),
    "weights of negative size": (
        lambda p: p["memory"].update(weights=-1),
        "malformed: positions.all.plans.main.memory.weights",
    ),
    "a number of 5000 digits": (lambda p: value(p).update(type=f"f32[{'9' * 5000}]"), "does not read"),
    "no cache": (lambda p: p["states"].clear(), "is read|no paged KV"),
    "a cache of other pages": (lambda p: p["states"]["kv.0"].update(type="f32[pages, 2, 8, 1, 26]"), "page is"),
    "a cache of another shape": (
        lambda p: p["states"]["kv.0"].update(type="f32[pages, 2, 16, 1, 3]"),
        "page is",
    ),
    "fewer tokens than the manifest says": (lambda p: p["dims"].update(T=[1, 8]), "the limits need T up to 1024"),
}


@reference
@pytest.mark.parametrize("case", WRONG_PLANS)
def test_a_plan_that_cannot_be_run(plain: Path, case: str) -> None:
    edit, message = WRONG_PLANS[case]
    edit_json(plain, "plan.json", lambda plans: edit(plans["positions"]["all"]["plans"]["main"]))
    with pytest.raises(IngotError, match=message) as caught:
        run(plain)
    # What only shows when it runs is reported as ours, for then the plan was one that reads well.
    assert caught.value.exit_code == 2 or "yields" in str(caught.value) or "failed" in str(caught.value)


WRONG_ENTRIES: dict[str, tuple[Edit, str]] = {
    "an unknown entry in a step": (lambda p: p["round"].append("draft"), "a step runs main, draft"),
    "a step without main": (lambda p: p["round"].clear(), "a step runs nothing"),
    "another entry in front of main": (lambda p: p.update(round=["draft", "main"]), "a step runs draft, main"),
    "no main": (lambda p: p["plans"].update(draft=p["plans"].pop("main")), "it has no entry 'main'"),
    "a plan of another entry": (lambda p: p["plans"]["main"].update(entry="draft"), "the plan is that of 'draft'"),
    "two entries with other states of one name": (
        lambda p: p["plans"].update(draft={**p["plans"]["main"], "entry": "draft", "states": other_states(p)}),
        "it is kind='row'.*i64",
    ),
}


def other_states(plans: Any) -> Any:
    states = plans["plans"]["main"]["states"]
    return {**states, "position": {**states["position"], "type": "i64[S]"}}


@reference
@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_entries_that_cannot_be_run_together(plain: Path, case: str) -> None:
    edit, message = WRONG_ENTRIES[case]
    edit_json(plain, "plan.json", lambda file: edit(file["positions"]["all"]))
    assert re.search(message, refusal(plain))


def exe(plan: Any) -> Any:
    return next(iter(plan["executables"].values()))


def take(plan: Any, other: str) -> None:
    """Let the first call of an executable take another argument."""
    first(plan, "exe.")["args"][0]["ref"] = other


WRONG_EXECUTABLES: dict[str, tuple[Edit, str]] = {
    "an unknown backend": (lambda p: exe(p).update(backend="tensorrt"), "provider is 'inductor'|backend 'tensorrt'"),
    "an id of its own": (lambda p: exe(p).update(id="0" * 64), "an executable's id"),
    "no files": (lambda p: exe(p).update(files=[]), "has no files"),
    "a file that is not there": (lambda p: exe(p).update(files=["kernel.so"]), "has no file '.*kernel.so'"),
    "a file outside": (lambda p: exe(p).update(files=["../../../plan.json"]), "has no file"),
    "an input too few": (lambda p: exe(p)["inputs"].pop(), "it is called with"),
    "an output too many": (lambda p: exe(p)["outputs"].append("f32[T]"), "it yields"),
    "an argument of another type": (lambda p: take(p, "norm.weight"), "it is called with"),
    "a constant": (lambda p: first(p, "exe.")["args"].__setitem__(0, 3), "it is called with"),
    "an option": (lambda p: first(p, "exe.").update(kwargs={"fast": True}), "it is called with"),
    "a result too few": (lambda p: first(p, "exe.")["results"].pop(), "it yields"),
    "an unknown one": (lambda p: first(p, "exe.").update(target="exe."), "the executable is unknown"),
    "another provider": (lambda p: first(p, "exe.").update(provider="reference"), "the provider is 'reference'"),
}


@inductor
@pytest.mark.parametrize("case", WRONG_EXECUTABLES)
def test_executables_that_do_not_fit_their_calls(compiled: Path, case: str) -> None:
    edit, message = WRONG_EXECUTABLES[case]
    edit_json(compiled, "plan.json", lambda plans: edit(plans["positions"]["all"]["plans"]["main"]))
    assert re.search(message, refusal(compiled))


@inductor
def test_an_executable_that_is_no_library(compiled: Path) -> None:
    from resign import sign

    library = next(compiled.glob("exe/*/*/*.so"))
    put(library, b"\x7fELF" + bytes(100))
    sign(compiled, library.relative_to(compiled).as_posix())
    with pytest.raises(IngotError, match="the library does not load"):
        run(compiled)


NORM = "norm.weight"
WRONG_WEIGHTS: dict[str, tuple[Edit, str]] = {
    "a weight missing": (lambda w: w.pop(NORM), "weight 'norm.weight' is missing"),
    "no place": (lambda w: w[NORM].pop("file"), "weights.json is malformed: norm.weight"),
    "two places": (lambda w: w[NORM].update(same_as="embed.weight"), "weights.json is malformed: norm.weight"),
    "a list": (lambda w: w.update({NORM: []}), "weights.json is malformed: norm.weight"),
    "a field too many": (lambda w: w[NORM].update(scale=2.0), "malformed: norm.weight.scale"),
    "an unknown dtype": (lambda w: w[NORM].update(dtype="f33"), "the dtype is 'f33'"),
    "another dtype": (lambda w: w[NORM].update(dtype="i32"), "'norm.weight' has dtype i32"),
    "another shape": (lambda w: w[NORM].update(shape=[74]), "'norm.weight' has shape"),
    "another rank": (lambda w: w[NORM].update(shape=[75, 1]), "'norm.weight' has shape"),
    "a negative size": (lambda w: w[NORM].update(shape=[-75]), "malformed: norm.weight.shape"),
    "two negative sizes": (lambda w: w[NORM].update(shape=[-5, -15]), "malformed: norm.weight.shape"),
    "a size of no elements": (lambda w: w[NORM].update(shape=[0]), "'norm.weight' has shape"),
    "a fraction": (lambda w: w[NORM].update(shape=[75.5]), "malformed: norm.weight.shape"),
    "a truth value": (lambda w: w[NORM].update(shape=[True]), "malformed: norm.weight.shape"),
    "a huge size": (lambda w: w[NORM].update(shape=[1 << 62]), "it lies at bytes"),
    "huge sizes": (lambda w: w[NORM].update(shape=[1 << 40, 1 << 40]), "it lies at bytes"),
    "a size beyond 64 bits": (lambda w: w[NORM].update(shape=[1 << 70]), "malformed: norm.weight.shape"),
    "a negative offset": (lambda w: w[NORM].update(offset=-4), "malformed: norm.weight.offset"),
    "an offset past the end": (lambda w: w[NORM].update(offset=1 << 40), "it lies at bytes"),
    "an odd offset": (lambda w: w[NORM].update(offset=w[NORM]["offset"] + 1), "at a multiple of 4"),
    "a file that is no weight file": (lambda w: w[NORM].update(file="plan.json"), "the file 'plan.json' is none"),
    "a file outside": (lambda w: w[NORM].update(file="../../etc/passwd"), "the file '../../etc/passwd' is none"),
    "an unknown original": (
        lambda w: w.update({NORM: {**unplaced(w), "same_as": "nothing"}}),
        "same_as is 'nothing'",
    ),
    "its own original": (lambda w: w.update({NORM: {**unplaced(w), "same_as": NORM}}), "same_as is 'norm.weight'"),
    "another original": (
        lambda w: w.update({NORM: {**unplaced(w), "same_as": "embed.weight"}}),
        "'norm.weight' has shape",
    ),
}


def unplaced(weights: Any) -> dict[str, Any]:
    return {name: item for name, item in weights[NORM].items() if name not in ("file", "offset")}


@reference
@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_bind(plain: Path, case: str) -> None:
    edit, message = WRONG_WEIGHTS[case]
    edit_json(plain, "weights.json", edit)
    assert re.search(message, refusal(plain))


@reference
@pytest.mark.parametrize(
    "text", ["", "[]", "null", "7", '{"a": 1', '{"a": NaN}', "[" * 100_000, '"\\ud800"', "\ufeff{}"]
)
@pytest.mark.parametrize("relpath", ["plan.json", "weights.json"])
def test_files_that_hold_something_else(plain: Path, relpath: str, text: str) -> None:
    from resign import sign

    (plain / relpath).write_text(text)
    sign(plain, relpath)
    assert relpath in refusal(plain)


WRONG_LIMITS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda m: m["model"].pop("vocab_size"), "vocab_size is None"),
    "a text": (lambda m: m["model"].update(max_batch="8"), "max_batch is '8'"),
    "zero": (lambda m: m["model"].update(page_size=0), "page_size is 0"),
    "negative": (lambda m: m["model"].update(max_seq_len=-1), "max_seq_len is -1"),
    "a truth value": (lambda m: m["model"].update(max_tokens=True), "max_tokens is True"),
    "a fraction": (lambda m: m["model"].update(max_tokens=1.5), r"max_tokens is 1\.5"),
    "more sequences than compiled": (lambda m: m["model"].update(max_batch=9), "the limits need B up to 9"),
    "more tokens than compiled": (lambda m: m["model"].update(max_tokens=1025), "the limits need T up to 1025"),
    "a longer context": (lambda m: m["model"].update(max_seq_len=1 << 40), "the limits need P up to"),
    "other pages": (lambda m: m["model"].update(page_size=32), "the limits need P up to 5|page_size is 32"),
    "no end tokens": (lambda m: m["model"].pop("eos_token_ids"), "eos_token_ids is None"),
    "wrong end tokens": (lambda m: m["model"].update(eos_token_ids="1,x"), "eos_token_ids is '1,x'"),
    "negative end tokens": (lambda m: m["model"].update(eos_token_ids="-1"), "eos_token_ids is '-1'"),
    "end tokens beyond counting": (lambda m: m["model"].update(eos_token_ids="9" * 5000), "eos_token_ids is '9"),
}


@reference
@pytest.mark.parametrize("case", WRONG_LIMITS)
def test_a_manifest_with_other_limits_than_the_plan(plain: Path, case: str) -> None:
    edit, message = WRONG_LIMITS[case]
    edit_json(plain, MANIFEST, edit)
    assert re.search(message, refusal(plain))
