"""Write a tiny checkpoint into a folder: `python tests/support/checkpoints/write_tiny.py NAME FOLDER`."""

import sys
from pathlib import Path


def main() -> None:
    support = Path(__file__).parents[1]
    sys.path += [str(support / "checkpoints"), str(support / "oracles")]  # `pythonpath` in pyproject.toml is for pytest
    from tiny import CHECKPOINTS

    match sys.argv[1:]:
        case [name, folder] if name in CHECKPOINTS:
            CHECKPOINTS[name].write(Path(folder))
        case _:
            sys.exit(f"usage: write_tiny.py NAME FOLDER\nNAME is one of {', '.join(CHECKPOINTS)}")


if __name__ == "__main__":
    main()
