"""Compute the outputs that every program of an entry must return for the same steps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.observe import Tensors, by_token, observe
from ingot.debug.bisect.programs.schedule import (
    PAGE_SIZE,
    SAMPLERS,
    Request,
    Step,
    in_chunks,
    is_cached,
    whole,
    with_pages,
)
from ingot.ir import ops
from ingot.ir.cache.form import CacheForm
from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import VerifyError
from ingot.ir.features import turn_of
from ingot.ir.mesh import Rank, ranks
from ingot.ir.program import Program, StateSpec, named_arguments

# Tokens generated after each prompt: the second step reads the token that the first left on the device.
GENERATED = 2
# Besides outputs, the expected result of these ops, called once in a program, is known; by printed name.
OP_NAMES = ("ingot.select_rows",)

_KeysAndValues = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class FirstDifference:
    """The first wrong output of a program: the step, the output's name, and a description of both values. If a call
    fails instead, `node` names it and `output` is empty."""

    step: int
    output: str
    text: str
    node: str = ""


@dataclass(frozen=True)
class Expectation:
    """The right outputs of an entry's programs for some requests, in float64. `program` is the one that they were
    computed with.

    `outputs` has the outputs of each step of a cached program, by name. It omits unknown ones: states other than caches
    and rows. Caches have the page numbers of the cache group that keeps every token. `logits` has a row for each token;
    it is None after a lossy pass over a cached program.
    """

    program: Program
    requests: tuple[Request, ...]
    pages: int
    page_size: int
    logits: torch.Tensor | None
    outputs: tuple[dict[str, torch.Tensor], ...]

    @property
    def pool(self) -> tuple[int, int]:
        """Return the number of pages, and the tokens of a page."""
        return self.pages, self.page_size

    def steps(self, program: Program, *, forced: bool = False, at_once: bool = False) -> list[Step]:
        """Return the steps to run a program on. A program without caches, or any program with `at_once`, takes all
        tokens in one step. If the program keeps generated tokens on the device, it reads them from there, unless they
        are `forced`."""
        if at_once or not is_cached(program):
            return whole(self.requests, self.pool)
        by_device = not forced and "last_token" in program.states
        return in_chunks(self.requests, self.pool, by_device=by_device)

    def difference(
        self, program: Program, params: Sequence[Tensors], *, forced: bool = False, at_once: bool = False
    ) -> FirstDifference | None:
        """Run a program in float64 and return the first output that differs from the expected one; None if none does.
        With `forced`, generated tokens are inputs; with `at_once`, all tokens form one step."""
        steps = self.steps(program, forced=forced, at_once=at_once)
        number = 0
        try:
            for number, seen in enumerate(observe(program, params, steps, self.pages, exact=True)):
                for name, expected in self.known_outputs(program, number, seen.step, at_once=at_once).items():
                    if name in seen.outputs and (text := differs(seen.outputs[name], expected)):
                        return FirstDifference(number, name, text)
        except VerifyError as error:
            failed = re.match(r"%(\S+),", error.where)
            return FirstDifference(number, "", error.what, failed[1] if failed else "")
        return None

    def known_outputs(
        self, program: Program, number: int, step: Step, *, at_once: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the expected float64 outputs of step number `number` of a program, by name. Outputs whose right values
        are unknown are left out."""
        known = {"logits": self.logits[step.places]} if self.logits is not None else {}
        if is_cached(program) and not at_once:
            known |= renumbered(self._of_ranks(self.outputs[number], program), program, self.pages)
        return known

    def _of_ranks(self, outputs: Mapping[str, torch.Tensor], program: Program) -> dict[str, torch.Tensor]:
        """Return outputs as a run of `program` returns them: on a mesh, the states of all ranks are stacked."""
        if not program.mesh or self.program.mesh:
            return dict(outputs)
        stacked = {
            name: torch.stack([_part(outputs[name], spec, rank) for rank in ranks(program.mesh)])
            for name, spec in program.states.items()
            if name in outputs
        }
        return {**outputs, **stacked}

    def known(self, program: Program, steps: int | None, *, at_once: bool = False) -> dict[str, torch.Tensor]:
        """Return the expected outputs that only a program with caches has, after its first `steps` steps: the last
        version of each state, and the rows of other outputs in the order of the requests. Empty for a program without
        caches. With `at_once`, only cache contents are returned."""
        if not is_cached(program):
            return {}
        outputs = self.outputs if at_once else self.outputs[:steps]
        states = {name: outputs[-1][name] for name in program.states if name in outputs[-1]}
        states = renumbered(states, program, self.pages)
        if at_once:
            return {name: value for name, value in states.items() if program.states[name].unit == "token"}
        order = torch.cat([step.places for step in self.steps(program)[:steps]]).argsort()
        rows = [name for name in outputs[-1] if name in OP_NAMES or (name in program.outputs and name not in states)]
        return {**states, **{name: torch.cat([one[name] for one in outputs])[order] for name in rows}}


def expect(
    program: Program,
    params: Sequence[Tensors],
    prompts: Sequence[Sequence[int]],
    *,
    page_size: int = PAGE_SIZE,
    rows: int,
    seed: int = 0,
) -> Expectation:
    """Run `program`, which has no caches, on the prompts and on tokens that are sampled after them. Return its outputs
    as the expected ones.

    `rows` is the number of device rows, and so the maximum of concurrent sequences. Tokens are sampled from the
    program's logits with the ops' references, so nothing comes from a program that is checked.
    """
    requests = [
        Request(tuple(prompt), len(prompt), SAMPLERS[index % len(SAMPLERS)], rows - 1 - index)
        for index, prompt in enumerate(prompts[:rows])
    ]
    logits, cached = torch.empty(0), {} if program.mesh else _cached(program)
    names = {node.name for pair in cached.values() for node in pair if node is not None}
    keys: dict[str, _KeysAndValues] = {}
    for generated in range(GENERATED + 1):
        (seen,) = observe(program, params, whole(requests, (1, page_size)), 1, exact=True, watch=names)
        logits = seen.outputs["logits"]
        value = {name: by_token(program, [seen], name)[0] for name in names}
        keys = {name: (value[k.name], None if v is None else value[v.name]) for name, (k, v) in cached.items()}
        if generated < GENERATED:
            ends = torch.tensor([len(request.tokens) for request in requests]).cumsum(0) - 1
            requests = [
                replace(request, tokens=(*request.tokens, _sampled(request, logits[end])))
                for request, end in zip(requests, ends.tolist(), strict=True)
            ]
    paged, pages = with_pages(requests, page_size, seed)
    outputs = _outputs(paged, keys, logits, (pages, page_size), rows)
    return Expectation(program, tuple(paged), pages, page_size, logits, tuple(outputs))


def renumbered(
    outputs: Mapping[str, torch.Tensor], program: Program, pages: int, *, back: bool = False
) -> dict[str, torch.Tensor]:
    """Return outputs with caches whose pages have the numbers of their own cache group in `program`. The argument has
    the numbers of the group that keeps every token. `back` converts the other way."""
    changed = dict(outputs)
    for name, spec in program.states.items():
        if name in outputs and "pages" in spec.type.shape and (turn := turn_of(CacheGroup.named(spec.group), pages)):
            axis = spec.type.shape.index("pages") - len(spec.type.shape)  # on a mesh, the first axis is the ranks
            changed[name] = outputs[name].roll(-turn if back else turn, axis)
    return changed


def _part(whole: torch.Tensor, spec: StateSpec, rank: Rank) -> torch.Tensor:
    """Return the part of the state `whole` that `rank` holds. If a dim, such as heads, is too small to divide among the
    ranks, its elements are repeated first."""
    for one in spec.placement:
        on, held = rank.on(one.axis), spec.type.shape[one.dim]
        if one.kind == "shard" and on is not None and isinstance(held, int):
            place, parts = on
            repeated = whole.repeat_interleave(held * parts // whole.shape[one.dim], one.dim)
            whole = repeated.narrow(one.dim, place * held, held)
    return whole


def rebased(before: Expectation, program: Program, params: Sequence[Tensors]) -> Expectation:
    """Return the expected outputs after a lossy pass over a program with caches: those of the new `program` itself. Its
    steps are those of `before`, the expected outputs before the pass."""
    steps = before.steps(program)
    seen = observe(program, params, steps, before.pages, exact=True)
    outputs = tuple(renumbered(one.outputs, program, before.pages, back=True) for one in seen)
    return replace(before, program=program, logits=None, outputs=outputs)


def _sampled(request: Request, logits: torch.Tensor) -> int:
    """Return the token that is sampled after a request's last one. `logits` are those of its last token."""
    alone = [replace(request, row=0)]
    step = whole(alone, (1, PAGE_SIZE))[0]
    counts = torch.full((1, logits.shape[-1]), -1, dtype=torch.int32)
    rows = torch.zeros(len(request.tokens), logits.shape[-1], dtype=logits.dtype)
    rows[-1] = logits
    return int(_chosen(step, rows, _counted(step, counts))[-1])


def _counted(step: Step, counts: torch.Tensor) -> torch.Tensor:
    given = step.inputs
    result: torch.Tensor = ops.count_tokens.reference(
        counts, given["tokens"], given["positions"], given["token_seqs"], given["rows"], given["prompt_ends"]
    )
    return result


def _chosen(step: Step, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    drawn = (step.inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"))
    penalties = (step.inputs[name] for name in ("count_rows", "repetition", "frequency", "presence", "banned"))
    result: torch.Tensor = ops.sample.reference(logits, *drawn, counts, *penalties)
    return result


def _outputs(
    requests: Sequence[Request],
    keys: Mapping[str, _KeysAndValues],
    logits: torch.Tensor,
    pool: tuple[int, int],
    rows: int,
) -> list[dict[str, torch.Tensor]]:
    """Return, for each step, the expected outputs of a program with caches, by name, except logits. `keys` has k and v
    of all tokens by the name of the cache; v is None if keys contain the values. `pool` is the number of pages, and the
    tokens of a page. `rows` is the number of device rows."""
    pages, page_size = pool
    shapes = {name: CacheForm.of(k, v).shape(page_size, k.shape[1])[1:] for name, (k, v) in keys.items()}
    caches = {name: torch.full((pages, *shape), float("nan"), dtype=torch.float64) for name, shape in shapes.items()}
    counts = torch.full((rows, logits.shape[-1]), -1, dtype=torch.int32)
    last_token = torch.full((rows,), -1, dtype=torch.int32)
    position = torch.full((rows,), -1, dtype=torch.int32)
    results = []
    for step in in_chunks(requests, pool, by_device=False):
        given = step.inputs
        counts = _counted(step, counts)
        tokens = _chosen(step, logits[step.places], counts)
        ids, logprobs, ranks = ops.top_logprobs.reference(
            logits[step.places], tokens, given["targets"], given["num_logprobs"]
        )
        last_token, position = last_token.clone(), position.clone()
        for row, length, at in zip(
            *(given[name].tolist() for name in ("rows", "kv_lens", "sample_index")), strict=True
        ):
            position[row] = length
            if at >= 0:
                last_token[row] = tokens[at]
        for name, (k, v) in keys.items():
            fed = (k[step.places], None if v is None else v[step.places])
            caches[name] = ops.kv_append.reference(caches[name], *fed, given["slots"])
        results.append(
            {
                "tokens": tokens,
                "logprob_ids": ids,
                "logprobs": logprobs,
                "ranks": ranks,
                "last_token": last_token,
                "position": position,
                "token_counts": counts,
                **dict.fromkeys(OP_NAMES, given["positions"]),
                **caches,
            }
        )
    return results


def _cached(program: Program) -> dict[str, tuple[fx.Node, fx.Node | None]]:
    """Return the k and v nodes that each layer's cache stores, by the name of the cache. v is None if keys contain the
    values."""
    return {
        f"kv.{bound['layer']}": (bound["k"], bound["v"]) for bound in map(_bound, program.calls(ops.attention.overload))
    }


def _bound(node: fx.Node) -> dict[str, Any]:
    return named_arguments(node)
