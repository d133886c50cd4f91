"""The host's time of a fake checkout."""

import argparse
import json
from pathlib import Path

from ingot.behaviour import MS

parser = argparse.ArgumentParser()
parser.add_argument("--running", type=int)
parser.add_argument("--only")
parser.add_argument("--json", type=Path)
options = parser.parse_args()
assert options.running == 256
options.json.write_text(json.dumps({"figures": {f"step_{case}": {"value": MS} for case in options.only.split(",")}}))
