"""shard and insert-collectives: a mesh of ranks computes what one device does, stage by stage."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import CASES
from staged import Step, logits_of, pass_context, staged

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import OptionError, PassError, VerifyError
from ingot.ir.infer_placement import placement_of
from ingot.ir.mesh import ranks
from ingot.ir.numerics.contracts import Measured, breach, changed_meaning
from ingot.ir.numerics.harness import MeshRun, rank_params, step_inputs, teacher_forced
from ingot.ir.numerics.recording import record
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Model, ParamSpec, Program, Stage, tensor_type
from ingot.ir.text import print_program
from ingot.ir.types import Placement
from ingot.ir.verify import verify
from ingot.passes.insert_collectives import InsertCollectives
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.pipeline import PIPELINE, SHARDING, pipeline_for
from ingot.passes.rewrite import Rewriter
from ingot.passes.shard import Shard

pytestmark = pytest.mark.one_in_file(3)

Apply = Callable[..., tuple[Program, PassRecord]]
Opened = Callable[[str], tuple[Model, Callable[[str], torch.Tensor]]]
OnMesh = Callable[[str], list[Step]]
MATCHES = Path(__file__).parents[1] / "goldens" / "matches_on_mesh.json"
MESH = {"tp": 2}
ENDS = {"insert-collectives": "SHARDED", "insert-ending": "CACHED", "fuse-qk-norm-rope": "FUSED"}
quick_first = [pytest.param(name, marks=pytest.mark.slow) if case.slow else name for name, case in CASES.items()]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    known: dict[str, tuple[Model, Callable[[str], torch.Tensor]]] = {}

    def get(name: str) -> tuple[Model, Callable[[str], torch.Tensor]]:
        if name not in known:
            known[name] = CASES[name].open(tmp_path_factory.mktemp("sharded"))
        return known[name]

    return get


@pytest.fixture(scope="module")
def on_mesh(opened: Opened) -> OnMesh:
    """What each pass made of a case on its mesh."""
    known: dict[str, list[Step]] = {}

    def get(name: str) -> list[Step]:
        if name not in known:
            mesh = CASES[name].mesh
            known[name] = staged(opened(name)[0], pipeline_for(mesh), mesh=mesh)[0]
        return known[name]

    return get


def requests(vocab: int) -> list[list[int]]:
    """One token, past one page of 16, past two pages."""
    return [
        [(index * 37 + place * place * 11 + 5) % vocab for place in range(n)] for index, n in enumerate((1, 17, 33))
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", quick_first)
def test_ranks_compute_what_one_device_does(name: str, opened: Opened, on_mesh: OnMesh) -> None:
    """After every pass against the pass before, and at the end of each stage against the program of one device."""
    model, read = opened(name)
    alone = {step.name: step for step in staged(model)[0]}
    steps = on_mesh(name)
    computed: dict[str, Measured] = {}

    def logits(step: Step) -> Measured:
        text = print_program(step.program).partition("\n")[2]
        if text not in computed:
            computed[text] = logits_of(step.program, read, requests(model.spec.vocab_size))
        return computed[text]

    broken: dict[str, str] = {}
    for before, after in itertools.pairwise(steps):
        assert after.record is not None
        if problem := breach(after.record.numerics, logits(before), logits(after), torch.float32):
            broken[after.name] = problem.text
    for step in steps:
        if stage := ENDS.get(step.name):
            assert step.program.mesh == CASES[name].mesh
            expected = logits(alone.get(step.name, alone["normalize"]))
            # Sums over ranks are added in another order, so errors against float64 are compared. The logits of either
            # program may be farther from float64 than the table's tolerance, which is for single ops.
            if problem := breach(Numerics.ROUNDING, expected, logits(step), torch.float32):
                broken[f"{stage}, from one device"] = problem.text
    assert not broken
    assert len(computed) >= 7, "sharding, collectives, paging, sampling, merging and regions each make another program"


def test_token_by_token(opened: Opened, on_mesh: OnMesh) -> None:
    """Decoding from the caches of the ranks, each of which holds its own heads."""
    _, read = opened("key-value groups")
    fused = next(step.program for step in on_mesh("key-value groups") if step.name == "fuse-qk-norm-rope")
    whole, single = (logits_of(fused, read, [list(range(5, 25)), [7]], chunk=chunk) for chunk in (64, 1))
    assert compare(single.exact, whole.exact, torch.float64, factor=100) is None
    caches = [spec for spec in fused.states.values() if spec.kind == "paged_kv"]
    assert [(spec.type.shape[3], spec.placement) for spec in caches] == [(1, (Placement("tp", "shard", 3),))] * 2


def test_an_indexer_is_whole_on_every_rank(on_mesh: OnMesh) -> None:
    fused = next(step.program for step in on_mesh("chosen positions") if step.name == "fuse-qk-norm-rope")
    assert fused.states["index.0"].type.shape == ("pages", 1, 16, 1, 22)
    whole = [spec.placement for name, spec in (*fused.params.items(), *fused.states.items()) if "index" in name]
    assert len(whole) == 5 and not any(whole)  # the linear of keys is merged with others
    (choice,) = fused.calls(ops.paged_choose_positions.overload)
    (attention,) = fused.calls(ops.sparse_attention.overload)
    assert placement_of(choice, fused) == () and placement_of(attention, fused) == (Placement("tp", "shard", 1),)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", quick_first)
def test_programs_read_back(name: str, on_mesh: OnMesh) -> None:
    for step in on_mesh(name):
        text = print_program(step.program)
        again = parse_program(text)
        assert print_program(again) == text
        verify(again, under=min(Stage[step.record.stage], Stage.LOWERED) if step.record else None)


@pytest.mark.parametrize("name", quick_first)
def test_matches(name: str, on_mesh: OnMesh) -> None:
    """UPDATE_GOLDENS=1 writes the counts, to be read before they are committed."""
    steps = on_mesh(name)
    found: dict[str, int] = {}
    for step in steps[1:]:
        assert step.record is not None
        found[step.name] = found.get(step.name, 0) + step.record.matches  # a pass may run on the way to several stages
    goldens: dict[str, dict[str, int]] = json.loads(MATCHES.read_text()) if MATCHES.exists() else {}
    if os.environ.get("UPDATE_GOLDENS"):
        kept = {**goldens, name: found}
        rows = [f" {json.dumps(case)}: {json.dumps(kept[case])}" for case in CASES if case in kept]
        MATCHES.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return
    assert found == goldens[name], "more is worth a new golden, less is lost speed"


def test_every_case_has_goldens() -> None:
    assert json.loads(MATCHES.read_text()).keys() == CASES.keys()


def test_params_of_a_rank(opened: Opened) -> None:
    """The merged q, k, v is one tensor whose parts are split each by itself; each rank's is a slice of the whole's."""
    model, read = opened("key-value groups")
    alone = run_pipeline(model, pass_context(bucket=None), (), upto=Stage.FUSED).fused
    fused = run_pipeline(model, pass_context(bucket=None, mesh=MESH), (), pipeline_for(MESH), upto=Stage.FUSED).fused
    assert fused.params.keys() == alone.params.keys()
    q, kv = 6 * 14, 2 * 14
    merged = fused.params["layers.0.attention.q_k_v.weight"]
    assert merged.placement == (Placement("tp", "shard", 0, (q, kv, kv)),) and merged.type.shape == (70, 54)
    assert fused.params["layers.0.mlp.gate_up.bias"].placement == (Placement("tp", "shard", 0, (100, 100)),)
    assert fused.params["layers.0.attention.o.weight"].placement == (Placement("tp", "shard", 1),)
    assert fused.params["layers.0.mlp.down.bias"].placement == ()
    for name, spec in fused.params.items():
        whole = alone.params[name].recipe.execute(read)
        parts = [spec.recipe.for_rank(rank).execute(read) for rank in ranks(MESH)] if spec.placement else [whole] * 2
        for rank, part in enumerate(parts):
            assert tuple(part.shape) == spec.type.shape
            assert torch.equal(part, _part(whole, spec, rank)), name


def _part(whole: torch.Tensor, spec: ParamSpec, rank: int) -> torch.Tensor:
    if not spec.placement:
        return whole
    place, pieces, begin = spec.placement[0], [], 0
    for size in place.segments or (whole.shape[place.dim],):
        pieces.append(whole.narrow(place.dim, begin + rank * size // 2, size // 2))
        begin += size
    return torch.cat(pieces, place.dim)


def test_heads_are_repeated_in_place(opened: Opened) -> None:
    """Three heads of k become 0 0 1 1 2 2: each rank's three serve its three heads of q."""
    model, read = opened("repeated key-value heads and biases")
    sharded = run_pipeline(
        model, pass_context(bucket=None, mesh=MESH), (), pipeline_for(MESH), upto=Stage.SHARDED
    ).fused
    for part in ("weight", "bias"):
        stored = read(f"model.layers.0.self_attn.k_proj.{part}").unflatten(0, (3, 10))
        recipe = sharded.params[f"layers.0.attention.k.{part}"].recipe
        found = [recipe.for_rank(rank).execute(read).unflatten(0, (3, 10)) for rank in ranks(MESH)]
        assert torch.equal(found[0], stored[[0, 0, 1]]) and torch.equal(found[1], stored[[1, 2, 2]])


def test_values_keep_their_names(opened: Opened, on_mesh: OnMesh) -> None:
    """Faults are located by values of the same name. A linear without its bias has another name."""
    _, read = opened("repeated key-value heads and biases")
    after = next(step.program for step in on_mesh("repeated key-value heads and biases") if step.name == "shard")
    before = next(step.program for step in on_mesh("repeated key-value heads and biases") if step.name == "normalize")
    old, new = (
        record(one, rank_params(one, read), step_inputs(one.input_types(), [[5, 6, 7], [8]]), only_exact=True).steps[0]
        for one in (before, after)
    )
    # Repeated heads of k and v have another shape.
    same = {name for name in old if old[name].measured.exact.shape == new[name].measured.exact.shape}
    assert not {name for name in same if changed_meaning(old[name].measured, new[name].measured)}
    summed = {name for name in same if (old[name].op, new[name].op) == ("ingot.linear", "aten.add.Tensor")}
    assert len(summed) == 2, "the projection after attention and the one down, with their biases"


def test_one_device_is_as_before(opened: Opened) -> None:
    """Without a mesh there is no such phase, and the pass alone changes nothing."""
    assert pipeline_for({}) is PIPELINE and SHARDING not in PIPELINE
    assert [phase for phase in pipeline_for(MESH) if phase is not SHARDING] == list(PIPELINE)
    stages = [phase.stage for phase in pipeline_for(MESH)]
    assert stages == sorted(stages)
    program = opened("key-value groups")[0].entries["main"]
    after, record = run_pass(Shard(), program, pass_context(), under=Stage.SHARDED)
    assert record.matches == 0 and record.ir_after == record.ir_before and not after.mesh
    with pytest.raises(PassError, match="the pipeline shards nothing"):
        run_pipeline(opened("key-value groups")[0], pass_context(bucket=None, mesh=MESH), ())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "problem"),
    [
        ("key-value groups", 4, "'layers.0.attention.q.weight' has 6 parts of 14, which do not divide among 4 ranks"),
        ("norms over all heads", 3, "'layers.0.attention.k.weight' has 2 parts of 14, which do not divide among 3"),
        ("q and k norms", 5, "has 6 parts of 26, which do not divide among 5 ranks"),
        ("norms by head", 2, "'layers.0.mlp.gate.weight' has 105 parts of 1, which do not divide among 2 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(name: str, tp: int, problem: str, opened: Opened) -> None:
    with pytest.raises(OptionError) as caught:
        run_pipeline(opened(name)[0], pass_context(bucket=None, mesh={"tp": tp}), (), pipeline_for({"tp": tp}))
    assert problem in caught.value.what and caught.value.where == f"mesh tp={tp}"


def test_a_vocabulary_that_does_not_divide_is_whole_for_a_reason(on_mesh: OnMesh) -> None:
    record = next(step.record for step in on_mesh("q and k norms") if step.name == "shard")
    assert record is not None
    assert [refusal.reason for refusal in record.refusals] == [
        "'embed.weight' has 373 parts of 1, which do not divide among 2 ranks: every rank holds it whole"
    ]


HEAD = "program main stage=QUANTIZED\ndim T in [1, 8]\ninput x: f32[T, 4]\n"


def sharded(apply: Apply, body: str) -> tuple[Program, PassRecord]:
    return apply(Shard(), HEAD + body, mesh=MESH)


def test_a_param_that_lies_otherwise_is_refused(apply: Apply) -> None:
    with pytest.raises(PassError, match=r"param 'gain.w' is tp=shard\(0\)"):
        sharded(
            apply,
            'param gain.w: f32[4] tp=split(0) = source(name="g")\n'
            "%y = ingot.rms_norm(%x, %gain.w, eps=0.1) : f32[T, 4]\nreturn y=%y\n",
        )


def _over_shared_rows(kv_heads: int) -> str:
    """Attention of six heads of q, which a mesh splits, over rows that are keys and values."""
    return (
        f"input k: f32[T, {kv_heads}, 4]\ninput positions: i32[T]\ninput token_seqs: i32[T]\n"
        'param q.w: f32[24, 4] tp=split(0, unit=4) = source(name="q")\n'
        "%linear = ingot.linear(%x, %q.w) : f32[T, 24]\n"
        "%q = aten.view.default(%linear, [-1, 6, 4]) : f32[T, 6, 4]\n"
        "%attention = ingot.attention(%q, %k, None, %positions, %token_seqs, scale=1.0, layer=0, value_width=3)"
        " : f32[T, 6, 3]\nreturn y=%attention\n"
    )


def test_a_row_for_all_heads_is_whole_on_every_rank(apply: Apply) -> None:
    """Each rank has its own heads of q, and all rows."""
    program, _ = sharded(apply, _over_shared_rows(1))
    (attention,) = program.calls(ops.attention.overload)
    assert attention.meta["placement"] == (Placement("tp", "shard", 1),)
    assert tensor_type(attention).shape == ("T", 3, 3)
    assert str(program.input_types()["k"]) == "f32[T, 1, 4]" and not placement_of(attention.args[1], program)


def test_shared_rows_of_heads_that_do_not_divide_are_refused(apply: Apply) -> None:
    with pytest.raises(
        VerifyError, match="a cache whose rows are keys and values has 3 heads, which do not divide among 2 ranks"
    ):
        sharded(apply, _over_shared_rows(3))


def test_latents_are_not_split(opened: Opened, on_mesh: OnMesh) -> None:
    """The cache of every rank has the whole row of a token, and its matrices of keys and values those of its heads."""
    _, read = opened("latents for all heads")
    fused = next(step.program for step in on_mesh("latents for all heads") if step.name == "fuse-qk-norm-rope")
    caches = {str(spec.type): spec.placement for spec in fused.states.values() if spec.kind == "paged_kv"}
    assert caches == {"f32[pages, 1, 16, 1, 34]": ()}
    split = (Placement("tp", "shard", 0),)
    assert fused.params["layers.0.attention.k_up"].placement == split
    assert fused.params["layers.0.attention.v_up"].placement == split
    assert not fused.params["layers.0.attention.kv_down_q_down.weight"].placement
    stored = read("model.layers.0.self_attn.kv_b_proj.weight").unflatten(0, (6, 22))
    for name, rows in (("k_up", stored[:, :10]), ("v_up", stored[:, 10:])):
        recipe = fused.params[f"layers.0.attention.{name}"].recipe
        parts = [recipe.for_rank(rank).execute(read) for rank in ranks(MESH)]
        assert torch.equal(parts[0], rows[:3].flatten(0, 1)) and torch.equal(parts[1], rows[3:].flatten(0, 1))
    whole, single = (logits_of(fused, read, [list(range(5, 25)), [7]], chunk=chunk) for chunk in (64, 1))
    assert compare(single.exact, whole.exact, torch.float64, factor=100) is None


def test_a_program_with_states_is_refused(apply: Apply) -> None:
    with pytest.raises(PassError, match="the program has states already"):
        sharded(apply, "state s: row i32[4] group=g unit=sequence\nreturn s=%s, x=%x\n")


def test_views_of_parts(apply: Apply) -> None:
    """Sizes are those of a rank; what would take a part of a head, or tear a param, is refused."""
    body = """param rows.w: f32[12, 4] tp=split(0) = source(name="w")
%h = ingot.linear(%x, %rows.w) : f32[T, 12]
%a = aten.view.default(%h, [-1, 2, 6]) : f32[T, 2, 6]
%b = aten.view.default(%a, [-1, 12]) : f32[T, 12]
return b=%b
"""
    program, _ = sharded(apply, body)
    assert [view.args[1] for view in program.calls(torch.ops.aten.view.default)] == [[-1, 1, 6], [-1, 6]]
    with pytest.raises(PassError, match="a view takes 6 elements of a rank in runs of 4"):
        sharded(apply, body.replace("[-1, 2, 6]", "[-1, 3, 4]").replace("T, 2, 6", "T, 3, 4"))
    torn = """param columns.w: f32[6, 4] tp=split(1) = source(name="w")
%a = aten.view.default(%columns.w, [24]) : f32[24]
return a=%a, x=%x
"""
    with pytest.raises(PassError, match=r"param 'columns.w' is tp=shard\(1\)"):
        sharded(apply, torn)


def test_every_move_between_placements(apply: Apply, golden: Callable[..., PassRecord]) -> None:
    """Golden texts: a part gathered, partial sums summed, partial sums summed by parts, a part taken."""
    record = golden(Shard(), mesh=MESH)
    assert record.matches == 2 and record.numerics is Numerics.ROUNDING
    owed = golden(InsertCollectives())
    assert owed.matches == 4 and owed.numerics is Numerics.EXACT
    assert owed.ir_before.partition("\n")[2] == record.ir_after.partition("\n")[2]
    counts = {
        name: owed.op_count_diff[f"ingot.{name}"]
        for name in ("all_gather", "all_reduce", "reduce_scatter", "take_part")
    }
    assert counts == dict.fromkeys(counts, 1)


# --- mutations -------------------------------------------------------------------------------------------------------


def _fused(opened: Opened) -> tuple[Program, Callable[[str], torch.Tensor], Measured, list[list[int]]]:
    model, read = opened("key-value groups")
    fused = run_pipeline(model, pass_context(bucket=None, mesh=MESH), (), pipeline_for(MESH), upto=Stage.FUSED).fused
    asked = requests(model.spec.vocab_size)[:2]
    return fused, read, logits_of(fused, read, asked), asked


def _wrong(
    program: Program, read: Callable[[str], torch.Tensor], asked: list[list[int]], right: Measured
) -> str | None:
    """How the logits differ; also that ranks differ among themselves."""
    try:
        return compare(logits_of(program, read, asked).exact, right.exact, torch.float64, factor=100)
    except VerifyError as error:
        return error.what


def test_a_dropped_all_reduce_is_seen(opened: Opened) -> None:
    fused, read, right, asked = _fused(opened)
    count = len(list(fused.calls(ops.all_reduce.overload)))
    assert count == 5 and _wrong(fused, read, asked, right) is None
    for index in range(count):
        program = fused.copy()
        rewriter = Rewriter(program)
        node = list(program.calls(ops.all_reduce.overload))[index]
        source: Any = node.args[0]
        rewriter.replace(node, source)
        with pytest.raises(VerifyError, match="tp=partial"):
            verify(program)
        assert _wrong(program, read, asked, right) is not None


@pytest.mark.parametrize("segments", [(28, 84, 28), (28, 28, 84), (140,), (70, 42, 28)])
def test_wrong_segments_are_seen(segments: tuple[int, ...], opened: Opened) -> None:
    fused, read, right, asked = _fused(opened)
    name = "layers.0.attention.q_k_v.weight"
    spec = fused.params[name]
    for what in ("recipe", "both"):
        program = fused.copy()
        attrs = tuple(sorted({**dict(spec.recipe.attrs), "segments": segments}.items()))
        recipe = type(spec.recipe)(spec.recipe.step, spec.recipe.inputs, attrs)
        placement = (Placement("tp", "shard", 0, segments),) if what == "both" else spec.placement
        program.params[name] = ParamSpec(spec.type, recipe, placement)
        with pytest.raises(VerifyError):
            verify(program)
        assert _wrong(program, read, asked, right) is not None


def test_ranks_that_disagree_are_seen(opened: Opened) -> None:
    model, read = opened("q and k norms")
    fused = run_pipeline(model, pass_context(bucket=None, mesh=MESH), (), pipeline_for(MESH), upto=Stage.FUSED).fused
    run = MeshRun.load(fused, read)
    run.params = [run.params[0], {**run.params[1], "norm.weight": run.params[1]["norm.weight"] * 2}]
    with pytest.raises(VerifyError, match="ranks 0 and 1 return different 'logits'"):
        teacher_forced(fused.input_types(), run, [[3, 4]])
