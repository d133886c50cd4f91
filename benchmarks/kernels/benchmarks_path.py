"""Make the modules of benchmarks/ importable; every script here imports this first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
