"""What the scripts here import first: it makes the modules of benchmarks/, which they share, importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
