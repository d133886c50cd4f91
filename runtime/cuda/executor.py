"""The executor of a GPU: decode steps as captured graphs, all others by launching their instructions."""

import time
from collections.abc import Mapping

import torch

from ingot.ir.errors import StepMemoryError
from ingot.ir.parse import parse_type
from ingot.ir.plan import BucketPlan, Plan
from ingot.runtime.bucket import Executables, Libraries, Watch, bound_buckets
from ingot.runtime.cuda.decode_graph import DecodeGraph, graph_sizes
from ingot.runtime.cuda.handle import CudaStepHandle, to_host
from ingot.runtime.executor import bound_params, choose_bucket, step_sizes
from ingot.runtime.states import States
from ingot.runtime.step import step_views
from ingot.runtime.token_counts import recount

# Sequences of a captured decode step; one of fewer is filled up. As far apart as vLLM has them for small batches
# (1, 2, 4, 8, then steps of 8), since a row of padding costs little.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
# Providers whose calls read data on the host, or allocate by it: a graph cannot hold them.
_UNCAPTURABLE = frozenset({"reference", "rowwise"})


class CudaExecutor:
    """A plan, checked by `check_plan`, bound to weights, executables and states on a GPU.

    Arguments are those of `ingot.runtime.executor.Executor`, tensors on the current device. Without `graphs` every step
    is launched instruction by instruction. Steps run on a stream of their own, in the order of their launches.
    `captured` tells the seconds that each graph took, by its rows.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        executables: Executables,
        sizes: Mapping[str, int],
        libraries: Libraries | None = None,
        states: States | None = None,
        *,
        graphs: bool = True,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.plan = plan
        self.libraries = libraries or {}
        self.sizes = dict(sizes)
        self.inputs = {name: parse_type(text) for name, text in plan.inputs.items()}
        self.states = States(plan.states, self.sizes) if states is None else states
        self.params = bound_params(plan, params, self.sizes)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = stream or torch.cuda.Stream(self.device)
        self.captured: dict[int, float] = {}
        self._buckets = bound_buckets(plan, {**self.params, **self.states}, executables, self.libraries)
        self._pages = plan.dims.get("P", (1, 1))[1]
        self._rows = self._capturable_rows() if graphs else ()
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None) -> CudaStepHandle:
        """Start a step on `inputs`, which lie on the host, and return without waiting for it. `watch` runs the
        instructions, one by one. Raises StepMemoryError when the GPU has no memory for it."""
        try:
            with torch.cuda.stream(self.stream):
                recount(self.states, inputs)
            return self._launch(inputs, watch)
        except torch.OutOfMemoryError as error:
            said = ". ".join(str(error).split(". ")[:2])  # and then what the whole process holds
            tokens, sequences = (inputs[name].shape[0] for name in ("tokens", "q_lens"))
            raise StepMemoryError(
                f"no memory for a step of {tokens} tokens of {sequences} sequences: {said}"
            ) from error

    def _launch(self, inputs: Mapping[str, torch.Tensor], watch: Watch | None) -> CudaStepHandle:
        with torch.cuda.stream(self.stream):
            rows = inputs["rows"].shape[0] if "rows" in inputs else 0
            rated = "num_logprobs" in inputs and bool((inputs["num_logprobs"] >= 0).any())
            if watch is None and self._is_decode(inputs, rows):
                return self._graph(rows).launch(inputs, rows, rated=rated)
            sizes = step_sizes(self.inputs, inputs, self.sizes)
            bucket = choose_bucket(self._buckets, inputs, sizes)
            outputs = bucket.run(self._sent(inputs), sizes, watch)
            tokens = to_host(outputs["tokens"])
            return CudaStepHandle(bucket.plan.bucket.name, outputs, tokens.tolist, torch.cuda.Event(), rated=rated)

    def capture(self, rows: int) -> None:
        """Make sure that decode steps of `rows` sequences have a graph. Nothing that runs is disturbed."""
        if any(rows <= size for size in self._rows):
            with torch.cuda.stream(self.stream):
                self._graph(rows)

    def _is_decode(self, inputs: Mapping[str, torch.Tensor], rows: int) -> bool:
        """One token and one row of logits for each sequence, in their order, and a graph that holds them."""
        if not self._rows or not 0 < rows <= self._rows[-1]:
            return False
        # As many tokens as sequences, and a sequence feeds one at least. A row of logits for each: all are sampled.
        return inputs["tokens"].shape[0] == rows == inputs["logit_rows"].shape[0] and not bool(
            (inputs["sample_index"] < 0).any()
        )

    def _capturable_rows(self) -> tuple[int, ...]:
        """The sizes of decode steps whose bucket class a graph can hold, up to the largest batch."""
        largest = self.plan.dims.get("B", (1, 0))[1]
        sizes = graph_sizes(GRAPH_ROWS, largest)
        plans = {size: next((b.plan for b in self._buckets if b.plan.bucket.holds(size, 1)), None) for size in sizes}
        return tuple(size for size, plan in plans.items() if plan is not None and is_capturable(plan))

    def _sent(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The inputs on the device: by one copy where they are views of one buffer."""
        flat, sizes = getattr(inputs, "flat", None), getattr(inputs, "sizes", None)
        if flat is None or sizes is None:
            return {name: value.to(self.device) for name, value in inputs.items()}
        # The caller's buffer serves the next step but one as soon as this one has retired; a pageable copy has read it
        # when it returns.
        return step_views(flat.to(self.device), sizes)

    def _graph(self, rows: int) -> DecodeGraph:
        size = next(size for size in self._rows if size >= rows)
        if size not in self._graphs:
            begin = time.perf_counter()
            self._graphs[size] = self._capture(size)
            self.captured[size] = time.perf_counter() - begin
        return self._graphs[size]

    def _capture(self, size: int) -> DecodeGraph:
        bucket = next(bucket for bucket in self._buckets if bucket.plan.bucket.holds(size, 1))
        sizes = {**self.sizes, **dict.fromkeys("TBL", size), "P": self._pages}
        return DecodeGraph(bucket, size, self._pages, sizes, self.device, self._pool)


def is_capturable(bucket: BucketPlan) -> bool:
    """Whether a graph can hold the instructions of a bucket class: calls of compiled code and libraries, and aten's
    views and arithmetic."""
    return all(
        one.calls is not None or one.provider not in _UNCAPTURABLE or one.target.startswith("aten.")
        for one in bucket.instructions
    )
