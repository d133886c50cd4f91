"""The compile of a fake checkout."""

import argparse
import json
from pathlib import Path

from ingot.behaviour import MS

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--work", type=Path)
parser.add_argument("--measure", choices=("full", "cached"))
parser.add_argument("--options")
parser.add_argument("--json", type=Path)
options = parser.parse_args()
assert (options.checkpoint / "config.json").is_file() and options.options == "--max-seq-len 4096"
for name in ("cache", "model.ingot"):
    (options.work / name).mkdir(exist_ok=True)
(options.work / "model.ingot" / "made").touch()
name = {"full": "compile", "cached": "compile_cached"}[options.measure]
options.json.write_text(json.dumps({"figures": {name: {"value": MS}}}))
