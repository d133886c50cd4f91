"""Measure the kernels of one shape on this machine's GPU, in one call and one result: FOLDER/kernels_SHAPE.json.

    python benchmarks/gpu_kernels.py --shape 8b --out FOLDER [--skip step] [--seconds 30]

linear      matmuls, and cuBLAS's                                           kernels/linear.py
step        the small kernels of a step                                     kernels/step.py
attention   decode attention, and FlashInfer's if it is installed           kernels/attention.py
prefill     prefill attention, and FlashInfer's                             kernels/prefill.py
For the last part nvcc compiles for a minute, in parallel with the first parts. Each part measures for at most
--seconds. Calls without time left, wrong results and failed parts are recorded as missing. The result is written after
each part.
"""

import argparse
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu import Found, run
from random_checkpoint import SHAPES
from results import revision, write_result

from ingot.bench.children import ChildError, Ended, run_command

KERNELS = Path(__file__).parent / "kernels"
PARTS = ("linear", "step", "attention", "prefill")
_BESIDE = 240.0  # seconds for starting and compiling a part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--skip", default="", help="parts to leave out, separated by commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="measuring time of each part")
    options = parser.parse_args()
    skipped = set(filter(None, options.skip.split(",")))
    if (unknown := skipped - set(PARTS)) or skipped == set(PARTS):
        sys.exit(f"--skip {options.skip}: choose from {', '.join(PARTS)}" + (", not all of them" * (not unknown)))
    revision()  # fail now if it is unknown
    found = Found()
    with TemporaryDirectory(prefix="ingot-kernels-") as work, ThreadPoolExecutor(1) as beside:
        building = beside.submit(build, options.shape, work) if "prefill" not in skipped else None
        for part in PARTS:
            if part not in skipped:
                measure(part, options, work, building, found)
                print(f"== {part}: {found.missing.get(part, 'done')}", flush=True)
                path = write(options, found)
    print(path)


def build(shape: str, work: str) -> Ended:
    """Compile the kernels that kernels/prefill.py measures into the folder `work`.

    `shape` is a model shape, such as "8b". Raises ChildError if the compile fails.
    """
    script: list[str | Path] = [sys.executable, KERNELS / "prefill.py", "--shape", shape, "--work", work, "--build"]
    return run_command(script, timeout=_BESIDE)


def measure(part: str, options: argparse.Namespace, work: str, building: "Future[Ended] | None", found: Found) -> None:
    """Run the script of one part of the benchmark. Its results are added to `found`. If it fails, the reason is added
    instead.

    `building` is the running compile of kernels in the folder `work`. Only the part "prefill" needs these kernels, and
    waits for them.
    """
    command = [KERNELS / f"{part}.py", "--shape", options.shape, "--seconds", str(options.seconds)]
    if part == "prefill" and building is not None:
        command += ["--work", work]
        try:
            building.result()
        except ChildError as error:
            found.missing[part] = f"its kernels were not compiled: {error}"
            return
    run(part, command, found, options.seconds + _BESIDE)


def write(options: argparse.Namespace, found: Found) -> Path:
    """Write the result of all parts that have run so far. Return the path of the file."""
    options.out.mkdir(parents=True, exist_ok=True)
    return write_result(
        __file__,
        "kernels_" + re.sub(r"\W", "_", options.shape),
        {"shape": options.shape},
        found.figures,
        versions=found.versions,
        folder=options.out,
        missing=found.missing,
    )


if __name__ == "__main__":
    main()
