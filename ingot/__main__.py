"""`python -m ingot`: the command `ingot`."""

from ingot.cli.main import main

if __name__ == "__main__":
    main()
