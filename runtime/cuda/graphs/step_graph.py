"""Capture and replay of steps of one size. A graph includes the copies of inputs from the host and of outputs to it."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch

from ingot.ir.errors import InternalError
from ingot.runtime.cuda.graphs.delayed import CarriedValues, DelayedEndings, carried_values
from ingot.runtime.cuda.graphs.device_view import device_view
from ingot.runtime.cuda.graphs.memory import GraphMemory
from ingot.runtime.cuda.graphs.staging import DeviceInputs, HostInputs, PinnedInts, move
from ingot.runtime.cuda.handle import CudaStepHandle
from ingot.runtime.steps.bucket import Bucket
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes
from ingot.runtime.steps.step_outputs import StepOutputs

# Steps in flight at once: the running one, and the one being prepared. Each needs its own pinned memory, and so its own
# graph, which copies from and to that memory. If endings are delayed, all steps are in flight whose ending has not run.
_IN_FLIGHT = 2


class StepGraph:
    """Two CUDA graphs for steps of one padded size, or more if endings are delayed. They take turns: while one runs,
    the host writes the inputs of the other.

    bucket         the instructions of the steps
    layout         where each input is in the buffer of step inputs
    step_outputs   describes the outputs that the steps return
    size           the sizes that each step is padded to
    dims           the value of every symbolic dim at these sizes, by name
    device         the GPU
    memory         the memory that all graphs of an executor share
    apart          capture the ending as a graph of its own, for steps whose ending waits for the host
    delayed        runs endings next to later forward passes; None: endings run at once

    The constructor captures all graphs on the current stream, without waiting for work there. Raises BackendError if
    that fails.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: StepLayout,
        step_outputs: StepOutputs,
        size: StepSizes,
        dims: Mapping[str, int],
        device: torch.device,
        memory: GraphMemory,
        *,
        apart: bool = False,
        delayed: DelayedEndings | None = None,
    ) -> None:
        self.what = f"the graph of {size.T} tokens of {size.B} sequences"
        inputs = DeviceInputs(layout, size, device)
        # Run once without a graph, on padding, which changes no state. This initializes libraries, and an error names
        # the call that is at fault.
        move(inputs.flat, inputs.flat)
        bucket.rehearse(inputs.views, dims)
        apart = apart or delayed is not None or bool(layout.late)
        # A delayed ending reads inputs of its step when the next step has begun.
        each = [inputs] * _IN_FLIGHT
        if delayed is not None:
            each = [inputs, *(DeviceInputs(layout, size, device) for _ in range(delayed.most))]
        self._graphs = [
            _OneGraph(bucket, one, step_outputs, dims, memory, self.what, apart=apart, delayed=delayed) for one in each
        ]
        self._turn = 0
        # The buffers that only these graphs read and write.
        self.buffers = {}
        for place, graph in enumerate(self._graphs):
            self.buffers[f"inputs on the device {place}"] = each[place].flat
            self.buffers[f"inputs {place}"] = graph.inputs.flat.host
            self.buffers |= {f"{name} {place}": ints.host for name, ints in graph.read.items()}

    def launch(
        self, inputs: Mapping[str, torch.Tensor], step: StepSizes, *, returns_logprobs: bool
    ) -> CudaStepHandle | LateStep:
        """Start a step on the current stream, and return its handle. If some inputs are filled only later, it is a
        LateStep; so it is if the ending is a graph of its own.

        inputs             the step's inputs on the host
        step               the step's sizes without padding
        returns_logprobs   copy log-probabilities to the host

        The handle's `outputs` are valid until the next launch. Results that it copies to the host, such as `tokens`,
        are valid until the launch after the next.
        """
        graph = self._graphs[self._turn]
        self._turn = (self._turn + 1) % len(self._graphs)
        return graph.launch(inputs, step, returns_logprobs=returns_logprobs)


class _OneGraph:
    """One CUDA graph for steps of one padded size. It has pinned host memory for its inputs, and for the outputs that
    the host reads after every step."""

    def __init__(
        self,
        bucket: Bucket,
        inputs: DeviceInputs,
        step_outputs: StepOutputs,
        dims: Mapping[str, int],
        memory: GraphMemory,
        what: str,
        *,
        apart: bool,
        delayed: DelayedEndings | None,
    ) -> None:
        self._bucket = bucket.plan.bucket.name
        self._memory = memory
        self._step_outputs = step_outputs
        self.inputs = HostInputs(inputs.layout, inputs.sizes)
        self.read = {name: PinnedInts([step_outputs.size(name, inputs.sizes)]) for name in step_outputs.read}
        self._retired = torch.cuda.Event()
        self._launches = 0
        self._graph = torch.cuda.CUDAGraph()
        # An ending that waits for the host is a separate graph.
        self._ending = torch.cuda.CUDAGraph() if apart else None
        early = inputs.layout.early_words(inputs.sizes)
        where = f"bucket class {self._bucket}"
        self._delayed = delayed
        self._carried: CarriedValues | None = None  # its memory must live as long as the graphs
        if delayed is not None:
            names = carried_values(bucket.plan, bucket.outputs, delayed.place)
            self._carried = CarriedValues(bucket, names, dims, inputs.flat.device)
        ending_memory = memory if delayed is None else delayed.memory
        with ExitStack() as capture:
            capture.enter_context(memory.captured(self._graph, what, where))
            move(self.inputs.flat.device[:early], inputs.flat[:early])
            bucket.begin(inputs.views, dims)
            if self._carried is not None:
                self._carried.keep()
            if self._ending is not None:
                capture.close()
                capture.enter_context(ending_memory.captured(self._ending, f"the ending of {what}", where))
                if inputs.layout.late:
                    move(self.inputs.flat.device[early:], inputs.flat[early:])
                else:
                    # The ending begins with a plain kernel, as the forward pass does: its own first kernel may be
                    # launched as dependent on the one before it in the graph. This one changes nothing.
                    move(inputs.flat[:1], inputs.flat[:1])
            outputs = bucket.end(dims)
            for name, ints in self.read.items():
                move(outputs[name], ints.device)
        self._complete = bucket.captured()
        # The views do not keep the memory: the next graph may use it.
        self._outputs = {name: device_view(value, keep=False) for name, value in outputs.items()}

    def launch(
        self, inputs: Mapping[str, torch.Tensor], step: StepSizes, *, returns_logprobs: bool
    ) -> CudaStepHandle | LateStep:
        self._retired.synchronize()  # the step before last has read its inputs and written its results
        if self._launches:
            self._complete()
        self._memory.begin_launch()
        self.inputs.fill(inputs)
        self._graph.replay()
        self._launches += 1
        if self._ending is None:
            return self._launched(step, returns_logprobs=returns_logprobs)
        if not isinstance(inputs, StepInputs) and self._delayed is None:
            self._ending.replay()
            return self._launched(step, returns_logprobs=returns_logprobs)
        given, ending = inputs, self._ending
        stream = torch.cuda.current_stream() if self._delayed is None else self._delayed.stream

        def end() -> CudaStepHandle:
            with torch.cuda.stream(stream):
                if isinstance(given, StepInputs):
                    self.inputs.fill_late(given)
                ending.replay()
                return self._launched(step, returns_logprobs=returns_logprobs)

        return LateStep(self._bucket, end)

    def _launched(self, step: StepSizes, *, returns_logprobs: bool) -> CudaStepHandle:
        outputs = self._step_outputs.cut(self._outputs, step)
        lend = partial(self._memory.lend, launch=self._memory.launches)
        read = partial(self._read, step, self._launches)
        parts = self._bucket, outputs, read, self._retired
        return CudaStepHandle(*parts, returns_logprobs=returns_logprobs, lend=lend, check=self._memory.check)

    def _read(self, step: StepSizes, launch: int, name: str) -> list[int]:
        """Return the values of an output that was copied to the host, without padding.

        step     the sizes of the step
        launch   the number of the step's launch
        name     the name of the output

        Raises InternalError if a later launch has overwritten the output.
        """
        if launch != self._launches:
            raise InternalError(f"the {name} of a step are read after a later step has overwritten them")
        values: list[int] = self.read[name].host[: self._step_outputs.size(name, step)].tolist()
        return values
