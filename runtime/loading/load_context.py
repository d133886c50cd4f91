"""The load context of this process: the artifact's mesh, and this process's rank, device and stream."""

from collections.abc import Mapping

import torch

from ingot.ir.artifact.manifest import Manifest
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.machine.load_context import Communicator, LoadContext
from ingot.ir.mesh import ONE_DEVICE, Mesh, Rank, mesh_text, parse_mesh, ranks, world_size
from ingot.runtime.cpu.allocator import HostAllocator
from ingot.runtime.cuda.allocator import DeviceAllocator


def mesh_of(manifest: Manifest) -> Mesh:
    """Return the mesh that an artifact was compiled for. A mesh is the arrangement of devices, such as tp=2. Raises
    ArtifactError if the manifest's mesh is invalid."""
    text = manifest.model.get("mesh")
    if text is None:
        return ONE_DEVICE
    try:
        return parse_mesh(str(text)[:80])
    except OptionError as error:
        raise ArtifactError(error.what, where="manifest.json, model", expected=error.expected) from None


def check_one_device(manifest: Manifest) -> None:
    """Raise TargetError for an artifact that was compiled for several devices, because the caller runs on one."""
    if mesh := mesh_of(manifest):
        raise TargetError(
            f"the artifact was compiled for {world_size(mesh)} ranks ({mesh_text(mesh)})",
            expected="one: only serving runs several ranks",
            hint="serve it with LLM or `ingot serve`, or compile the model without a mesh",
        )


def context_on(device_type: str, rank: Rank, mesh: Mesh, communicators: Mapping[str, Communicator]) -> LoadContext:
    """Return the context for loading a rank's part of an artifact. `device_type` is "cpu", or "cuda" for the current
    GPU. A GPU's context has a new CUDA stream. `communicators` connect the rank with others, by mesh axis."""
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return LoadContext(
        device=device,
        rank=rank,
        mesh=mesh,
        stream=torch.cuda.Stream(device) if on_gpu else None,
        communicators=communicators,
        allocator=DeviceAllocator(device) if on_gpu else HostAllocator(),
    )


def on_one_device(device_type: str) -> LoadContext:
    """Return the context for loading an artifact onto one device. `device_type` is as in `context_on`."""
    (rank,) = ranks(ONE_DEVICE)
    return context_on(device_type, rank, ONE_DEVICE, {})
