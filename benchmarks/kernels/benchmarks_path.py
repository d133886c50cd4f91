"""Make the modules of benchmarks/ importable. Every script in this folder imports this module first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
