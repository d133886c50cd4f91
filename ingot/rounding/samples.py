"""The tensors that a site is computed with: params from the checkpoint, and hidden states of sample tokens."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.ops import op_of
from ingot.ir.program import Program, is_call
from ingot.rounding.sites import Site, inputs_of
from ingot.rounding.tensors import Read, check_finite, check_gain, few_rows, is_quantized, rows_of

# The check computes SAMPLES sequences of TOKENS tokens. A token attends to those before it in its sequence.
TOKENS, SAMPLES = 16, 3
Params = Mapping[fx.Node, torch.Tensor]


class SampleValues:
    """The params and hidden states with which the sites of one program are computed.

    A site is a group of calls that passes may fuse. `read` returns checkpoint tensors by name. `folder` is the
    checkpoint's folder for error messages, or "". Unless it is "", CheckpointError is raised for tensors with NaN or
    infinity, and for norms with all gains zero.
    """

    def __init__(self, program: Program, read: Read, folder: str) -> None:
        self._program, self._read, self._folder = program, read, folder
        self._tables: dict[fx.Node, torch.Tensor] = {}

    def params(self, site: Site) -> Params:
        """Return the params that the calls of a site read. Of a large matrix, it returns only some rows."""
        return {node: self._param(node) for node in site.params()}

    def _param(self, node: fx.Node) -> torch.Tensor:
        if node in self._tables:
            return self._tables[node]
        name = str(node.target)
        spec = self._program.params[name]
        # A copy: BLAS adds in an order that depends on the alignment of a tensor in the mapped file.
        tensor = few_rows(spec.recipe, spec.type.bind({}), self._read).clone()
        if self._folder and tensor.is_floating_point():
            check_finite(name, tensor, spec.recipe, self._folder)
            norms = (ops.rms_norm, ops.layer_norm)
            if any(op_of(user.target) in norms and node is user.args[1] for user in node.users):
                check_gain(name, tensor, spec.recipe, self._folder)
        if not spec.recipe.sources():  # a table such as that of rope, which all layers read
            self._tables[node] = tensor
        return tensor

    def stored_name(self, node: fx.Node) -> str:
        """Return the checkpoint's name of a param. It is several names, joined by commas, if several tensors make the
        param.
        """
        spec = self._program.params[str(node.target)]
        return ", ".join(sorted(spec.recipe.sources())) or str(node.target)

    def quantized(self, site: Site) -> str:
        """Return the name of a quantized param that the calls of a site read, or "" if there is none."""
        names = (str(node.target) for node in site.params())
        return next((name for name in names if is_quantized(self._program.params[name].recipe)), "")

    def values(self, site: Site, params: Params) -> dict[fx.Node, Any]:
        """Return every value that the calls of a site read, by graph node, for SAMPLES * TOKENS tokens.

        `params` are the site's params.
        """
        found: dict[fx.Node, Any] = dict(params)
        tokens = torch.arange(SAMPLES * TOKENS, dtype=torch.int32)
        for node in inputs_of(self._program, site):
            found[node] = tokens % TOKENS if str(node.target) == "positions" else tokens // TOKENS
        declared = (site.norm.args[0] if site.norm else site.hidden).meta["type"]  # type: ignore[union-attr]
        hidden = self._hidden_states(int(declared.shape[-1])).to(declared.dtype)
        if site.norm is None:
            return {**found, site.hidden: hidden}
        op = op_of(site.norm.target)
        assert op is not None
        bound = op.bind(site.norm.args, dict(site.norm.kwargs))
        call = {name: params.get(one, hidden) if isinstance(one, fx.Node) else one for name, one in bound.items()}
        return {**found, site.hidden: op.reference(**call)}

    def _hidden_states(self, width: int) -> torch.Tensor:
        """Return hidden states [SAMPLES * TOKENS, width].

        They are embeddings of tokens from the whole vocabulary, because these have the model's outlier channels. If
        embeddings have another width, they are normal random numbers.
        """
        if self._embeddings.shape[1] == width:
            return self._embeddings
        return torch.randn(SAMPLES * TOKENS, width, generator=torch.Generator().manual_seed(1))

    @cached_property
    def _embeddings(self) -> torch.Tensor:
        tables = (node.args[1] for node in self._program.calls() if is_call(node, ops.embedding.overload))
        table = next((one for one in tables if isinstance(one, fx.Node) and one.op == "placeholder"), None)
        if table is None:
            return torch.empty(0, 0)
        spec = self._program.params[str(table.target)]
        # Two primes, so that neighbouring samples are far apart in the vocabulary.
        rows = (torch.arange(SAMPLES * TOKENS) * 7919 + 5) % spec.type.bind({})[0]
        found = rows_of(spec.recipe, rows, self._read).float()
        if self._folder:
            check_finite(str(table.target), found, spec.recipe, self._folder)
        return found
