"""Targets: what the driver says of a GPU, GPUs by name, and what of all that compiled code depends on."""

import ctypes
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu, find_gpus, reaches
from ingot.ir.machine.gpus import FEATURES, TYPICAL, Gpu, features_of
from ingot.ir.machine.target import Target

H200 = Gpu("NVIDIA H200", 90, 150_754_820_096, 132, 4_916_736_000_000, driver="13.0")


class Driver:
    """libcuda and libnvidia-ml as a machine with an H200 has them. `fails` names a function that does; `peers` are the
    other GPUs, `links` the states of the links to them."""

    # CUdevice_attribute as cuda.bindings.driver has it, and what `nvidia-smi` and torch say of an H200.
    ATTRIBUTES: ClassVar = {
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
        "CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE": 3_201_000,
        "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH": 6144,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    }

    def __init__(self, fails: str = "", peers: int = 0, links: tuple[int, ...] = (), **changed: int) -> None:
        self.fails, self.peers, self.links, self.calls = fails, peers, links, []
        enum = pytest.importorskip("cuda.bindings.driver").CUdevice_attribute
        found = {**self.ATTRIBUTES, **changed}
        self.attributes = {int(getattr(enum, name)): value for name, value in found.items()}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cu", "nvml")):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 100
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        return call

    def _cuGetErrorName(self, status: int, text: Any) -> None:
        text._obj.value = {100: b"CUDA_ERROR_NO_DEVICE"}[status]

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device._obj.value = 7 + ordinal

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 1 + self.peers

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        assert 7 <= device <= 7 + self.peers
        value._obj.value = self.attributes[attribute]

    def _cuDeviceTotalMem_v2(self, size: Any, device: int) -> None:
        size._obj.value = 150_754_820_096

    def _cuDeviceGetName(self, text: Any, size: int, device: int) -> None:
        text.value = b"NVIDIA H200"

    def _cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13000

    def _cuDeviceCanAccessPeer(self, can: Any, device: int, peer: int) -> None:
        can._obj.value = (device, peer) == (7, 8)

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, state: Any) -> None:
        state._obj.value = dict(enumerate(self.links)).get(link, 0)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    find_gpu.cache_clear()
    yield
    find_gpu.cache_clear()


def on_machine(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """What the process finds from now on."""
    find_gpu.cache_clear()

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_gpu_as_the_driver_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    on_machine(monkeypatch, driver)
    assert find_gpu() == H200
    assert not [name for name in driver.calls if "Ctx" in name or name.startswith("nvml")], "a context takes memory"
    assert find_gpu() is find_gpu() and driver.calls.count("cuInit") == 1
    target = Target.detect("cuda")
    assert target == Target.detect("auto")
    assert (target.name, target.device, target.sm, target.gpu) == ("sm_90", "cuda", 90, "NVIDIA H200")
    assert (target.cores, target.memory, target.bandwidth) == (132, 150_754_820_096, 4_916_736_000_000)
    assert target.versions == {"torch": torch.__version__, "cuda": "13.0", "driver": "13.0"}


@pytest.mark.parametrize(("peers", "links", "there"), [(0, (1,), False), (1, (0, 1), True), (1, (0, 0), False)])
def test_nvlink_is_there_when_a_link_to_another_gpu_is_up(
    monkeypatch: pytest.MonkeyPatch, peers: int, links: tuple[int, ...], there: bool
) -> None:
    on_machine(monkeypatch, Driver(peers=peers, links=links))
    assert ("nvlink" in Target.detect("cuda").features) is there
    on_machine(monkeypatch, Driver(fails="nvmlInit_v2", peers=peers, links=links))
    assert "nvlink" not in Target.detect("cuda").features


def test_all_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(peers=2, links=(1, 1))
    on_machine(monkeypatch, driver)
    assert [gpu.product for gpu in find_gpus()] == ["NVIDIA H200"] * 3 and find_gpus()[0] == find_gpu()
    assert reaches(0, 1) and not reaches(1, 0)
    assert not [name for name in driver.calls if "Ctx" in name], "a context takes memory"
    on_machine(monkeypatch, None)
    with pytest.raises(TargetError, match="no NVIDIA driver"):
        find_gpus()


def test_a_memory_without_a_clock_has_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, Driver(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE=0))
    assert Target.detect("cuda").bandwidth is None


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceTotalMem_v2"])
def test_a_driver_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    on_machine(monkeypatch, Driver(fails=function))
    with pytest.raises(TargetError, match=f"no GPU that can be used: {function} says CUDA_ERROR_NO_DEVICE"):
        Target.detect("cuda")
    assert Target.detect("auto").name == "cpu"


def test_without_a_driver_or_a_torch_for_it_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, None)
    with pytest.raises(TargetError, match="it has no NVIDIA driver"):
        Target.detect("cuda")
    assert Target.detect("auto").name == "cpu"
    on_machine(monkeypatch, Driver())
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TargetError, match="is built without CUDA"):
        Target.detect("cuda")
    assert Target.detect("auto").name == "cpu"


# By hand from the table "Feature Support per Compute Capability" and the PTX ISA: what each architecture has.
HAVE = {
    75: {"cooperative_launch"},
    80: {"cooperative_launch", "bf16"},
    86: {"cooperative_launch", "bf16"},
    89: {"cooperative_launch", "bf16", "fp8"},
    90: {"cooperative_launch", "bf16", "fp8", "tma", "wgmma", "dependent_launch"},
    100: {"cooperative_launch", "bf16", "fp8", "tma", "dependent_launch", "fp4"},
    120: {"cooperative_launch", "bf16", "fp8", "tma", "dependent_launch", "fp4"},
}


@pytest.mark.parametrize("sm", HAVE)
def test_features_of_a_capability(sm: int) -> None:
    assert set(features_of(sm)) == HAVE[sm]
    assert all(FEATURES[name].needs.startswith(f"sm_{FEATURES[name].first}") for name in FEATURES)


@pytest.mark.parametrize("name", TYPICAL)
def test_a_gpu_by_name_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on_machine(monkeypatch, None)
    target = Target.named(name)
    assert (target.name, target.device, target.sm) == (name, "cuda", int(name.removeprefix("sm_")))
    assert target.arch == platform.machine() and target.gpu and target.bandwidth
    assert target.missing_here() == "this machine has no GPU that can be used: it has no NVIDIA driver (libcuda.so.1)"


def test_a_name_takes_this_machines_gpu_where_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, Driver(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=114))
    assert Target.named("sm_90").cores == 114 and not Target.named("sm_90").missing_here()
    assert Target.named("sm_80").cores == 108
    assert Target.named("sm_80").missing_here() == "this machine is another target: name: sm_80 against sm_90"
    on_machine(monkeypatch, Driver(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=3))
    assert Target.named("sm_93").sm == 93, "one that no list has"


@pytest.mark.parametrize("name", ["tpu", "sm_1", "sm_70", "sm_90a", "H200", "", "SM_90"])
def test_unknown_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on_machine(monkeypatch, None)
    with pytest.raises(TargetError, match=f"unknown target '{name}'") as caught:
        Target.named(name)
    assert caught.value.expected == "auto, cpu, cuda, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"


def test_what_code_for_a_gpu_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, Driver(peers=1, links=(1,)))
    found = Target.detect("cuda")
    on_machine(monkeypatch, None)
    typical = Target.named("sm_90")
    assert found != typical and found.difference(typical) is None
    assert list(found.identity()) == ["name", "device", "arch", "sm", "features", "versions"]
    assert found.identity(["torch"])["versions"] == {"torch": found.versions["torch"]}
    assert found.identity()["versions"] == {} and "nvlink" not in found.identity()["features"]
    fewer = found.model_copy(update={"cores": 114})
    assert fewer.difference(found) is None and fewer.code_identity() != found.code_identity()
    assert Target.named("sm_80").difference(found) == "name: sm_80 against sm_90"
    assert Target.detect("cpu").code_identity() == Target.detect("cpu").identity()


def test_a_cpu_is_found_without_asking_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(name: str) -> Any:
        raise AssertionError(name)

    find_gpu.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", must_not)
    assert Target.detect("cpu").name == "cpu" and Target.named("cpu").name == "cpu"


@pytest.mark.gpu
def test_the_driver_and_torch_agree() -> None:
    found, told = find_gpu(), torch.cuda.get_device_properties(0)
    assert found.product == told.name and found.sm == 10 * told.major + told.minor
    assert found.memory == told.total_memory and found.cores == told.multi_processor_count
    assert found.bandwidth is not None and 10**11 < found.bandwidth < 10**14
    assert replace(found, driver="") != found and Target.named(found.target).memory == found.memory


@pytest.mark.gpu
def test_finding_a_gpu_makes_no_context_and_starts_nothing_of_torch() -> None:
    import subprocess

    code = (
        "import torch; from ingot.ir.machine.target import Target; Target.detect('cuda');"
        "assert not torch.cuda.is_initialized(); from cuda.bindings import driver;"
        "status, context = driver.cuCtxGetCurrent(); assert int(status) == 0 and int(context) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
