"""A double of the module `tensorrt` on a CPU: the calls that the backend makes, with the signatures of the bindings.

It records every call. A network is the ONNX model, an engine is that model with its range of shapes, and a context runs
it by ONNX Runtime on the memory at the addresses that it got. It refuses what TensorRT's documentation forbids: a
network whose types do not fit, shapes outside of the profile, addresses that are not aligned, memory that is too
small. Matmuls of bfloat16 have sums of float32.
"""

import abc
import ctypes
import enum
import json
import math
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper, shape_inference

VERSION = "11.1.0.106"
# Bytes of device memory that every engine of the double needs.
MEMORY = 4096
ALIGNMENT = 256
# Op types that TensorRT's parser takes in bfloat16 too (docs/operators.md of onnx-tensorrt, 10.0), of those that
# translations use.
PARSED = frozenset(
    "Add Cast Clip Concat Div Exp Gather Gelu Gemm GreaterOrEqual Identity Log MatMul Max Mul ReduceMean ReduceSum "  # noqa: SIM905
    "Relu Reshape Sigmoid Slice Sqrt Sub Tanh Transpose Unsqueeze Where".split()
)
_MAGIC = b"double of a TensorRT engine\n"


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 0


class BuilderFlag(enum.IntEnum):
    TF32 = 6


class ExecutionContextAllocationStrategy(enum.IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger(abc.ABC):
    INTERNAL_ERROR, ERROR, WARNING = range(3)

    def __init__(self) -> None:
        self.ready = True

    @abc.abstractmethod
    def log(self, severity: int, msg: str) -> None: ...


class ParserError:
    def __init__(self, text: str, node: str, operator: str) -> None:
        self._parts = text, node, operator

    def desc(self) -> str:
        return self._parts[0]

    def node_name(self) -> str:
        return self._parts[1]

    def node_operator(self) -> str:
        return self._parts[2]


class INetworkDefinition:
    def __init__(self, flags: int) -> None:
        self.flags, self.model = flags, onnx.ModelProto()


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        CALLS.append(("set_shape", input, tuple(min), tuple(opt), tuple(max)))
        self.shapes[input] = [list(min), list(opt), list(max)]


class IBuilderConfig:
    def __init__(self) -> None:
        self.flags, self.profiles, self.max_aux_streams = {BuilderFlag.TF32}, list[IOptimizationProfile](), -1

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        ordered = all(a <= b <= c for one in profile.shapes.values() for a, b, c in zip(*one, strict=True))
        if not ordered:
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, logger: ILogger) -> None:
        assert logger.ready, "the constructor of ILogger was called"
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        CALLS.append(("create_network", flags))
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        CALLS.append(("build", config.flags, config.max_aux_streams))
        dynamic = {name for name, shape in _inputs(network.model).items() if -1 in shape}
        shapes = config.profiles[0].shapes if config.profiles else {}
        if dynamic != shapes.keys():
            self._logger.log(ILogger.ERROR, f"no range of shapes for {sorted(dynamic ^ shapes.keys())}")
            return None
        for name, ranges in shapes.items():
            wanted = _inputs(network.model)[name]
            if any(len(one) != len(wanted) for one in ranges) or any(
                size != -1 and {one[axis] for one in ranges} != {size} for axis, size in enumerate(wanted)
            ):
                self._logger.log(ILogger.ERROR, f"the range of {name} does not fit the network")
                return None
        header = json.dumps({"shapes": shapes}).encode()
        return _MAGIC + header + b"\n" + network.model.SerializeToString()


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self._errors = network, list[ParserError]()

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse(self, model: bytes, path: str | None = None) -> bool:
        CALLS.append(("parse", model))
        try:
            loaded = onnx.load_from_string(model)
            # The parser infers types by ONNX's rules, and a strongly typed network has these types.
            shape_inference.infer_shapes(loaded, check_type=True, strict_mode=True)
        except Exception as error:
            self._errors.append(ParserError(f"invalid model: {error}", "", ""))
            return False
        for node in loaded.graph.node:
            if node.op_type not in PARSED:
                self._errors.append(ParserError("no importer is registered", node.name, node.op_type))
                return False
        self._network.model = loaded
        return True


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger.ready, "the constructor of ILogger was called"
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        if not serialized_engine.startswith(_MAGIC):
            self._logger.log(ILogger.WARNING, "a warning")
            self._logger.log(ILogger.ERROR, "the magic tag does not match")
            return None
        header, _, model = serialized_engine.removeprefix(_MAGIC).partition(b"\n")
        return ICudaEngine(json.loads(header)["shapes"], onnx.load_from_string(model), self._logger)


class ICudaEngine:
    def __init__(self, shapes: dict[str, list[list[int]]], model: onnx.ModelProto, logger: ILogger) -> None:
        self.shapes, self.model, self.logger = shapes, model, logger
        self.names = [one.name for one in (*model.graph.input, *model.graph.output)]
        self._session: onnxruntime.InferenceSession | None = None

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        assert profile_index == 0, "the only profile"
        return MEMORY

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> "IExecutionContext":
        CALLS.append(("create_execution_context", strategy))
        return IExecutionContext(self, strategy)

    def _session_of_model(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.intra_op_num_threads = 1
            content = _with_wide_sums(self.model).SerializeToString()
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return self._session


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        self._engine, self._strategy = engine, strategy
        self._shapes = {name: shape for name, shape in _inputs(engine.model).items() if -1 not in shape}
        self._addresses: dict[str, int] = {}
        self._memory = 0, 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        CALLS.append(("set_input_shape", id(self), name, shape))
        least, _, largest = self._engine.shapes[name]
        if not all(low <= size <= high for low, size, high in zip(least, shape, largest, strict=True)):
            self._engine.logger.log(ILogger.ERROR, f"{shape} is outside of the profile")
            return False
        self._shapes[name] = list(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        CALLS.append(("set_tensor_address", id(self), name, memory))
        if name not in self._engine.names or memory % ALIGNMENT:
            return False
        self._addresses[name] = memory
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        CALLS.append(("set_device_memory", id(self), memory, size))
        assert self._strategy is ExecutionContextAllocationStrategy.USER_MANAGED, "the context has memory of its own"
        self._memory = memory, size

    def execute_async_v3(self, stream_handle: int) -> bool:
        CALLS.append(("execute_async_v3", id(self), stream_handle))
        address, size = self._memory
        problem = ""
        if size < MEMORY or address % ALIGNMENT or not address:
            problem = f"{size} bytes of device memory at {address:#x}"
        elif missing := _inputs(self._engine.model).keys() - self._shapes.keys():
            problem = f"no shape of {sorted(missing)}"
        elif missing := set(self._engine.names) - self._addresses.keys():
            problem = f"no address of {sorted(missing)}"
        if problem:
            self._engine.logger.log(ILogger.ERROR, problem)
            return False
        ctypes.memset(address, 0xAB, size)  # other contents would be lost on a GPU too
        self._run()
        return True

    def _run(self) -> None:
        session = self._engine._session_of_model()
        binding = session.io_binding()
        for one in self._engine.model.graph.input:
            shape, element = self._shapes[one.name], one.type.tensor_type.elem_type
            binding.bind_input(one.name, "cpu", 0, element, shape, self._addresses[one.name])
        symbols = self._sizes()
        for one in self._engine.model.graph.output:
            tensor = one.type.tensor_type
            shape = [symbols[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
            binding.bind_output(one.name, "cpu", 0, tensor.elem_type, shape, self._addresses[one.name])
        session.run_with_iobinding(binding)

    def _sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self._engine.model.graph.input:
            for dim, size in zip(one.type.tensor_type.shape.dim, self._shapes[one.name], strict=True):
                if dim.dim_param:
                    assert found.setdefault(dim.dim_param, size) == size, "two sizes of one symbol"
        return found


# All calls on the double since the last `clear`: the method and its arguments; of a context, its id first.
CALLS: list[tuple[Any, ...]] = []


def module(version: str | None = VERSION) -> ModuleType:
    """The double, for `sys.modules["tensorrt"]`."""
    CALLS.clear()
    made = ModuleType("tensorrt")
    made.__spec__ = ModuleSpec("tensorrt", None)
    names = (Builder, ICudaEngine, IBuilderConfig, IExecutionContext, ILogger, INetworkDefinition, IOptimizationProfile)
    names += (BuilderFlag, ExecutionContextAllocationStrategy, NetworkDefinitionCreationFlag)  # type: ignore[assignment]
    names += (OnnxParser, ParserError, Runtime)  # type: ignore[assignment]
    for one in names:
        setattr(made, one.__name__, one)
    if version is not None:
        made.__version__ = version  # type: ignore[attr-defined]
    return made


def _inputs(model: onnx.ModelProto) -> dict[str, list[int]]:
    """The shape of each input, with -1 for a size that is known when it runs."""
    return {
        one.name: [-1 if dim.dim_param else dim.dim_value for dim in one.type.tensor_type.shape.dim]
        for one in model.graph.input
    }


def _with_wide_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for ONNX Runtime, whose CPU multiplies no bfloat16: factors are cast, and the result is rounded."""
    inferred = shape_inference.infer_shapes(model, strict_mode=True)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    types = {one.name: one.type.tensor_type.elem_type for one in values}
    types |= {one.name: one.data_type for one in inferred.graph.initializer}
    nodes: list[onnx.NodeProto] = []

    def add(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    for node in inferred.graph.node:
        if node.op_type not in ("Gemm", "MatMul") or types[node.output[0]] != TensorProto.BFLOAT16:
            nodes.append(node)
            continue
        (out,) = node.output
        factors = [add("Cast", [name], f"{out}.wide{i}", to=1) for i, name in enumerate(node.input)]
        assert len(factors) == 2, "a bias would be added to a rounded product"
        flags = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        product = add(node.op_type, factors, f"{out}.sum", **flags)
        add("Cast", [product], out, to=TensorProto.BFLOAT16)
    made = onnx.ModelProto()
    made.CopyFrom(inferred)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def aligned(shape: Sequence[int], dtype: Any) -> Any:
    """A tensor of torch at a multiple of 256 bytes, as on a GPU, with values that no one should read."""
    import torch

    count = math.prod(shape)
    memory = bytearray(b"\xcd" * (count * dtype.itemsize + ALIGNMENT))
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % ALIGNMENT
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(tuple(shape))
