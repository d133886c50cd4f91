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
from ingot.ir.ops.logit_edits import EditParts
from ingot.ir.program import Program, StateSpec, named_arguments

# Tokens generated after each prompt: the second step reads the token that the first left on the device.
GENERATED = 2
# Printed names of ops with a known result, besides outputs. A program calls each at most once.
OP_NAMES = ("ingot.select_rows",)

_KeysAndValues = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class FirstDifference:
    """The first wrong output of a program.

    `step` is the number of the step, and `output` the output's name. `text` describes both values. If a call raises an
    error instead, `node` is the name of this call and `output` is "".
    """

    step: int
    output: str
    text: str
    node: str = ""


@dataclass(frozen=True)
class Expectation:
    """The right outputs, in float64, of the programs that a compile makes of one entry (such as `main`).

    `program` computed the outputs, and `requests` are the sequences that it ran on. `logits` [tokens, vocab] has a row
    for each token of all requests. It is None after a lossy pass over a program with caches.

    `outputs` has a mapping for each step: the outputs of a program with KV caches, by name. Outputs with unknown right
    values are left out. Cache pages in them are numbered as in the caches that keep every token. Caches with a window
    number their pages differently.
    """

    program: Program
    requests: tuple[Request, ...]
    pages: int
    page_size: int
    logits: torch.Tensor | None
    outputs: tuple[dict[str, torch.Tensor], ...]

    @property
    def pool(self) -> tuple[int, int]:
        """Return the size of the KV cache pool: the number of pages, and the number of tokens in a page."""
        return self.pages, self.page_size

    def steps(self, program: Program, *, forced: bool = False, at_once: bool = False) -> list[Step]:
        """Return the steps to run `program` on.

        A program without caches gets one step with all tokens. With `at_once`, every program gets one step. A program
        that keeps the last sampled token on the device reads it there. With `forced`, the right token is an input
        instead.
        """
        if at_once or not is_cached(program):
            return whole(self.requests, self.pool)
        by_device = not forced and "last_token" in program.states
        return in_chunks(self.requests, self.pool, by_device=by_device)

    def difference(
        self, program: Program, params: Sequence[Tensors], *, forced: bool = False, at_once: bool = False
    ) -> FirstDifference | None:
        """Run a program in float64. Return the first output that differs from the expected one; None if none does.

        With `forced`, generated tokens are inputs, and the program does not read them from the device. With `at_once`,
        one step has all tokens.
        """
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
        """Return the expected outputs of `program` in one step, in float64, by name.

        `number` is the index of the step. Outputs with unknown right values are left out.
        """
        known = {"logits": self.logits[step.places]} if self.logits is not None else {}
        if is_cached(program) and not at_once:
            known |= renumbered(self._of_ranks(self.outputs[number], program), program, self.pages)
        return known

    def _of_ranks(self, outputs: Mapping[str, torch.Tensor], program: Program) -> dict[str, torch.Tensor]:
        """Convert expected outputs to what a run of `program` returns.

        If `program` runs on a mesh of devices, each state becomes a stack [ranks, …] of the ranks' parts.
        """
        if not program.mesh or self.program.mesh:
            return dict(outputs)
        stacked = {
            name: torch.stack([_part(outputs[name], spec, rank) for rank in ranks(program.mesh)])
            for name, spec in program.states.items()
            if name in outputs
        }
        return {**outputs, **stacked}

    def known(self, program: Program, steps: int | None, *, at_once: bool = False) -> dict[str, torch.Tensor]:
        """Return the expected values that only a program with caches has, by name. Empty for a program without caches.

        They are the contents of states after the first `steps` steps, and outputs with a row per token. Sampled tokens
        are such an output. Rows are in the order of the requests. With `at_once`, only the contents of caches are
        returned.
        """
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
    """Compute the outputs that all programs made from `program` must have. `program` has no KV caches.

    It runs on the prompts, and then on the tokens that are sampled after them. Tokens are sampled by the references of
    ops, because the sampling of the checked programs may be wrong.

    `params` has a mapping of the program's params for each rank. `rows` is the maximum number of concurrent sequences.
    Further prompts are ignored.
    """
    requests = [
        Request(tuple(prompt), len(prompt), SAMPLERS[index % len(SAMPLERS)], rows - 1 - index)
        for index, prompt in enumerate(prompts[:rows])
    ]
    logits, cached = torch.empty(0), {} if program.mesh else _cached(program)
    names = {node.name for k, v in cached.values() for node in (*k, v) if node is not None}
    keys: dict[str, _KeysAndValues] = {}
    for generated in range(GENERATED + 1):
        (seen,) = observe(program, params, whole(requests, (1, page_size)), 1, exact=True, watch=names)
        logits = seen.outputs["logits"]
        value = {name: by_token(program, [seen], name)[0] for name in names}
        keys = {
            name: (torch.cat([value[part.name] for part in k], -1), None if v is None else value[v.name])
            for name, (k, v) in cached.items()
        }
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
    """Renumber the pages of KV caches in expected outputs. Return the changed outputs by name.

    `outputs` number pages as in the caches that keep every token. The result numbers the pages of each cache as
    `program` does. Caches with a window number their pages differently. `pages` is the number of pages. With `back`,
    convert the other way.
    """
    changed = dict(outputs)
    for name, spec in program.states.items():
        if name in outputs and "pages" in spec.type.shape and (turn := turn_of(CacheGroup.named(spec.group), pages)):
            axis = spec.type.shape.index("pages") - len(spec.type.shape)  # on a mesh, the first axis is the ranks
            changed[name] = outputs[name].roll(-turn if back else turn, axis)
    return changed


def _part(whole: torch.Tensor, spec: StateSpec, rank: Rank) -> torch.Tensor:
    """Return the part of a state that one rank of a mesh holds.

    `whole` is the state on one device. A split dim, such as the KV heads, may be smaller than the number of ranks. Then
    its elements are repeated first.
    """
    for one in spec.placement:
        on, held = rank.on(one.axis), spec.type.shape[one.dim]
        if one.kind == "shard" and on is not None and isinstance(held, int):
            place, parts = on
            repeated = whole.repeat_interleave(held * parts // whole.shape[one.dim], one.dim)
            whole = repeated.narrow(one.dim, place * held, held)
    return whole


def rebased(before: Expectation, program: Program, params: Sequence[Tensors]) -> Expectation:
    """Return the expected outputs after a lossy pass over a program with caches.

    `program` is the result of the pass, and its outputs become the expected ones. It runs on the steps of `before`, the
    expected outputs before the pass. `params` has a mapping of the program's params for each rank.
    """
    steps = before.steps(program)
    seen = observe(program, params, steps, before.pages, exact=True)
    outputs = tuple(renumbered(one.outputs, program, before.pages, back=True) for one in seen)
    return replace(before, program=program, logits=None, outputs=outputs)


def _sampled(request: Request, logits: torch.Tensor) -> int:
    """Sample the token after a request's last token, by the references of ops. `logits` [vocab] belong to the last
    token."""
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
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seeds", "positions")
    drawn = (step.inputs[name] for name in names)
    penalties = (step.inputs[name] for name in ("count_rows", "repetition", "frequency", "presence", "banned"))
    edits = torch.full((1, EditParts(logits.shape[-1]).words), -1, dtype=torch.int32)
    no_row, last_token = torch.full((len(logits),), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    result: torch.Tensor = ops.sample.reference(logits, *drawn, counts, *penalties, edits, no_row, last_token)
    return result


def _outputs(
    requests: Sequence[Request],
    keys: Mapping[str, _KeysAndValues],
    logits: torch.Tensor,
    pool: tuple[int, int],
    rows: int,
) -> list[dict[str, torch.Tensor]]:
    """Compute the expected outputs of a program with caches, for each step by name. Logits are left out.

    `keys` maps the name of each cache to the keys and values of all tokens. The values are None if they are a part of
    the keys. `logits` has a row for each token. `pool` is the number of pages and the number of tokens in a page.
    `rows` is the maximum number of concurrent sequences.
    """
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


def _cached(program: Program) -> dict[str, tuple[tuple[fx.Node, ...], fx.Node | None]]:
    """Return the keys and values that each attention call will store in a cache.

    The result maps the cache's name, such as "kv.3", to the nodes of the keys and the node of the values. A key is a
    row of each of the first nodes, one after the other. The node of values is None if they are a part of the keys.
    """
    plain = map(_bound, program.calls(ops.attention.overload))
    latent = map(_bound, program.calls(ops.latent_attention.overload))
    found: dict[str, tuple[tuple[fx.Node, ...], fx.Node | None]]
    found = {f"kv.{bound['layer']}": ((bound["k"],), bound["v"]) for bound in plain}
    indexers = map(_bound, program.calls(ops.choose_positions.overload))
    found |= {f"index.{bound['layer']}": ((bound["k"],), None) for bound in indexers}
    return found | {f"kv.{bound['layer']}": ((bound["latents"], bound["k_rotated"]), None) for bound in latent}


def _bound(node: fx.Node) -> dict[str, Any]:
    return named_arguments(node)
