"""Make the command that runs a module of Ingot in a child process."""

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a Python module in a process that imports from the folders of this one.

    Plain `python -m` would search the working folder first, which a command such as `ingot` does not. A folder or file
    there with the name of a package would then replace the package in the child alone.
    """
    searched = {"", os.getcwd()} & set(sys.path)  # "" is the working folder, as in `python -c`
    return [sys.executable, *([] if searched else ["-P"]), "-m", module, *arguments]
