"""Plans with right digests and wrong content: an IngotError that names the place, never a crash."""

import re
from pathlib import Path
from typing import Any

import pytest
from damaged import inductor, put, reference, refusal, run
from resign import Edit, edit_json, sign

from ingot.ir.errors import IngotError


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
    "an unknown backend": (lambda p: first(p, "ingot.linear").update(backend="cudnn"), "the backend is 'cudnn'"),
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
        "no feature declares the input 'positions'",
    ),
    "no ending": (lambda p: p.pop("ending"), r"malformed: positions\.all\.plans\.main\.ending"),
    "an ending that does not parse": (lambda p: p.update(ending="sample("), r"the ending 'sample\(' does not parse"),
    "an attribute of another type": (
        lambda p: p.update(ending="pool(whole=mean)"),
        "the attribute 'whole' is of another type",
    ),
    "an unknown ending": (lambda p: p.update(ending="rank"), "unknown ending 'rank'"),
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
    "a name twice": (duplicate, "is used twice"),
    "an unknown input": (lambda p: p["inputs"].update(novel="i32[T]"), "the input 'novel'"),
    "an input of another type": (lambda p: p["inputs"].update(tokens="i64[T]"), "the input 'tokens' is i64"),
    "a type that does not parse": (lambda p: value(p).update(type="f32[T, "), "does not parse"),
    "an unknown dtype of a value": (lambda p: value(p).update(type="f31[T, 75]"), "does not parse: unknown dtype"),
    "a negative size": (lambda p: value(p).update(type="f32[T, -75]"), "does not parse: size -75"),
    "an unknown symbol": (lambda p: value(p).update(type="f32[Q, 75]"), "does not parse"),
    "a value of another shape": (lambda p: value(p).update(type="f32[T, 76]"), "ingot.embedding yields shape"),
    "a value of another dtype": (lambda p: value(p).update(type="f16[T, 75]"), "ingot.embedding yields dtype"),
    "a weight of another shape": (lambda p: p["params"].update({"norm.weight": "f32[76]"}), "'norm.weight' has shape"),
    "a weight of another dtype": (lambda p: p["params"].update({"norm.weight": "bf16[75]"}), "'norm.weight' has dtype"),
    "a weight with a symbol": (lambda p: p["params"].update({"norm.weight": "f32[T]"}), "has the dim T"),
    "a weight that is not there": (lambda p: p["params"].update(novel="f32[1]"), "'novel' is missing"),
    "a state with a step's dim": (lambda p: p["states"]["position"].update(type="i32[B]"), "has the dim B"),
    "slots that no state has": (lambda p: p["memory"].update(slot=4), r"slot is 4"),
    "a state too large": (lambda p: p["states"]["position"].update(type=f"i32[R, {1 << 50}]"), r"states is \d+"),
    "a state beyond counting": (lambda p: p["states"]["position"].update(type=f"i32[{1 << 90}]"), r"states is \d+"),
    "more memory than there is": (
        lambda p: p["buckets"][0]["memory"].update(activations=1 << 60),
        "do not fit into memory: of .* the activations 11529",
    ),
    "a peak that no instruction has": (lambda p: p["buckets"][0]["memory"].update(peak=10**6), "the peak is at"),
    "other pages in the memory": (lambda p: p["memory"]["groups"]["full"].update(page=7), "is page=7 "),
    "weights of negative size": (
        lambda p: p["memory"].update(weights=-1),
        "malformed: positions.all.plans.main.memory.weights",
    ),
    "a number of 5000 digits": (lambda p: value(p).update(type=f"f32[{'9' * 5000}]"), "does not parse"),
    "no cache": (lambda p: p["states"].clear(), "is read|no paged KV"),
    "a cache of other pages": (
        lambda p: p["states"]["kv.0"].update(type="f32[pages, 2, 8, 1, 26]"),
        "the group .full. is page=",
    ),
    "a cache of another shape": (
        lambda p: p["states"]["kv.0"].update(type="f32[pages, 2, 16, 1, 3]"),
        "the group .full. is page=",
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
    "a plan of another entry": (
        lambda p: p["plans"]["main"].update(entry="draft"),
        "is for the entry 'draft'",
    ),
    "two entries with other states of one name": (
        lambda p: p["plans"].update(draft={**p["plans"]["main"], "entry": "draft", "states": other_states(p)}),
        "it is kind='row'.*i64",
    ),
}


def other_states(plans: Any) -> Any:
    states = plans["plans"]["main"]["states"]
    return {**states, "position": {**states["position"], "type": "i64[R]"}}


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
    "an unknown backend": (lambda p: exe(p).update(backend="tensorrt"), "backend is 'inductor'|backend 'tensorrt'"),
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
    "another backend": (lambda p: first(p, "exe.").update(backend="reference"), "the backend is 'reference'"),
}


@inductor
@pytest.mark.parametrize("case", WRONG_EXECUTABLES)
def test_executables_that_do_not_fit_their_calls(compiled: Path, case: str) -> None:
    edit, message = WRONG_EXECUTABLES[case]
    edit_json(compiled, "plan.json", lambda plans: edit(plans["positions"]["all"]["plans"]["main"]))
    assert re.search(message, refusal(compiled))


@inductor
def test_an_executable_that_is_no_library(compiled: Path) -> None:
    library = next(compiled.glob("exe/*/*/*.so"))
    put(library, b"\x7fELF" + bytes(100))
    sign(compiled, library.relative_to(compiled).as_posix())
    with pytest.raises(IngotError, match="the library does not load"):
        run(compiled)
