"""`python -m ingot`: the command `ingot`."""

from ingot.cli import main

if __name__ == "__main__":
    main()
