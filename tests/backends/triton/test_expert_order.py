"""The order of waits and loads in the kernels for experts of few tokens, in the code that is compiled for them.

The launch of down loads its first weights before it waits for gate and up. So it reads `chosen` early, which the router
writes. Two facts make that safe. Gate and up let down begin only after they have waited for the router. And down reads
`chosen` past the L1 cache, which may hold what was there before.
"""

import re
from pathlib import Path

from drawn import in_one_of
from sm_90 import run_without_interpreter

SCRIPT = """
import json

from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine, compile_launches
from ingot.backends.triton.tune.experts import Mixture, make_schedule

device.DEVICE = "cpu"
found = {}
for format in ("plain", "int8"):
    mixture = Mixture(256, 256, experts=4, top_k=2, formats=(format, format))
    schedule, _ = make_schedule(Machine(90, 132), mixture, 1)
    for launch, made in zip(schedule.launches, compile_launches(schedule, {"T": 1}), strict=True):
        given = [name for name, value in launch.arguments.items() if value is not None]
        found[launch.kernel.__name__] = made.asm["ptx"], given.index("chosen")
print(json.dumps(found))
"""
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def loads(ptx: str, parameter: int) -> tuple[list[str], list[str]]:
    """The loads from addresses that derive from a parameter of the kernel, and all other loads of global memory."""
    own: set[str] = set()
    found: tuple[list[str], list[str]] = ([], [])
    for line in ptx.splitlines():
        first, *others = re.findall(r"ld\.global[\w.:]*|(?<!@)%\w+", line) or [""]
        if first.startswith("ld.global"):
            (address,) = re.findall(r"\[ *(%\w+)", line)
            found[address not in own].append(first)
        elif f"_param_{parameter}]" in line or own & set(others):
            own.add(first)
    return found


@in_one_of(2)
def test_down_reads_the_chosen_experts_once_they_are_known(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(SCRIPT)
    compiled = run_without_interpreter(tmp_path / "compiled.py")
    assert compiled.keys() == {f"{kind}experts_{part}_rows" for kind in ("", "quant_") for part in ("up", "down")}
    for name, (ptx, chosen) in compiled.items():
        order = re.findall(f"{WAIT}|{LAUNCH}", ptx)
        early, weights = loads(ptx[: ptx.index(WAIT)], chosen)
        if "up" in name:
            assert order == [WAIT, LAUNCH], name
            assert not early and not weights, name
        else:
            assert order == [LAUNCH, WAIT], name
            assert early and set(early) == {"ld.global.cg.b32"}, name
            assert weights, f"{name} loads nothing before it waits"
