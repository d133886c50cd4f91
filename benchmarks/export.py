"""Measure the time and memory of `ingot export` for a model with random weights.

    python benchmarks/export.py [--shape 1b] [--layers N] [--to onnx,safetensors] [--quantize FORMAT]
                                [--work FOLDER] [--json FILE]

It writes a checkpoint of the shape in bfloat16 and exports it, each time in a new process. The export is removed
afterwards. The seconds are those of the whole command, Python's start included. The peak of memory is the largest
resident set (VmHWM), pages of the mapped checkpoint included. `share` divides it by the bytes of the exported weights.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_checkpoint import SHAPES, config_of, write_checkpoint
from results import Figure, add_json_option, report

FORMS = ("onnx", "safetensors", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="number of layers; default: the shape's")
    parser.add_argument("--to", default="onnx", help=f"forms, separated by commas: {', '.join(FORMS)}")
    parser.add_argument("--quantize", help="format of the weights of linears")
    parser.add_argument("--work", type=Path, help="folder for checkpoint and exports; default: a temporary one")
    add_json_option(parser)
    options = parser.parse_args()
    forms = options.to.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        parser.error(f"unknown form '{unknown[0]}'")
    config = config_of(options.shape)
    if options.layers is not None:
        config = config_of(options.shape, num_hidden_layers=options.layers)
    figures = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        checkpoint = write_checkpoint(Path(folder) / "checkpoint", config)
        for form in forms:
            output = Path(folder) / form
            quantize = ["--quantize", options.quantize] if options.quantize else []
            seconds, peak = run(["export", str(checkpoint), str(output), "--to", form, *quantize])
            weights = weight_bytes(output)
            shutil.rmtree(output)
            figures |= {
                form: Figure(value=seconds, unit="s", what="of `ingot export`, Python's start included"),
                f"{form}_weights": Figure(value=weights, unit="B", what="of exported weights"),
                f"{form}_peak": Figure(value=peak, unit="B", what="of memory, pages of the checkpoint included"),
                f"{form}_share": Figure(value=peak / weights, unit="", what="peak of memory / exported weights"),
            }
    settings = {"shape": options.shape, "layers": config["num_hidden_layers"], "quantize": options.quantize or ""}
    report(__file__, options.json, settings, figures)


# The peak is read in the process itself: what wait4 reports includes the memory of the process that began it.
_CHILD = """
import sys
import ingot.cli.main as cli
code = cli.run(cli.INGOT, sys.argv[1:])
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
sys.exit(code)
"""


def run(arguments: list[str]) -> tuple[float, int]:
    """Run `ingot` with arguments in a new process. Return its seconds, and the peak bytes of its memory."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"export.py: `ingot {' '.join(arguments)}` ended with {done.returncode}")
    return seconds, int(done.stdout.split()[-1]) * 1024


def weight_bytes(output: Path) -> int:
    """Return the bytes of the files of an export that hold weights."""
    kinds = (".data", ".safetensors", ".pt2")
    return sum(path.stat().st_size for path in output.rglob("*") if path.suffix in kinds)


if __name__ == "__main__":
    main()
