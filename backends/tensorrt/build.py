"""Build a TensorRT engine from an ONNX model, on the GPU that it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.backends.tensorrt.library import last_error, logger, open_engine
from ingot.backends.tensorrt.profile import Shapes
from ingot.ir.errors import BackendError

_HINT = "compile with --backend triton, and report this"


@dataclass(frozen=True)
class Engine:
    """A serialized engine, and the bytes of device memory that a call of it needs besides inputs and outputs."""

    content: bytes
    memory: int


def build_engine(library: Any, model: bytes, profile: Mapping[str, Shapes], region: str) -> Engine:
    """Return the engine of an ONNX model. `library` is the module `tensorrt`.

    `profile` has the shapes of each input with symbols, and `region` is the region's name, for messages. The network is
    strongly typed: each value has the dtype of the model. Raises BackendError with TensorRT's reason if it does not
    parse or build the model.
    """
    log = logger(library)
    builder = library.Builder(log)
    # TensorRT 11 types every network strongly; the flag says that the model relies on it.
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, log)
    if not parser.parse(model):
        raise BackendError(
            f"TensorRT does not parse the ONNX model: {_parser_error(parser) or last_error(log)}",
            where=f"region {region}",
            hint=_HINT,
        )
    content = builder.build_serialized_network(network, _config(library, builder, profile, region))
    if content is None:
        raise BackendError(
            f"TensorRT does not build an engine: {last_error(log)}", where=f"region {region}", hint=_HINT
        )
    serialized = bytes(content)
    engine = open_engine(library, log, serialized, f"region {region}")
    return Engine(serialized, int(engine.get_device_memory_size_for_profile_v2(0)))


def _config(library: Any, builder: Any, profile: Mapping[str, Shapes], region: str) -> Any:
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)  # it rounds factors of float32 to 10 bits, and is on by default
    # One stream: the memory of a call is free for the next call in the stream's order.
    config.max_aux_streams = 0
    if profile:
        shapes = builder.create_optimization_profile()
        for name, one in profile.items():
            shapes.set_shape(name, one.least, one.tuned, one.largest)
        if config.add_optimization_profile(shapes) != 0:
            raise BackendError("TensorRT refuses the range of shapes", where=f"region {region}: {profile}"[:300])
    return config


def _parser_error(parser: Any) -> str:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(f"{one.desc()} (node {one.node_name()}, {one.node_operator()})" for one in errors)[:400]
