"""The C++ compiler of this machine, for the backends that need one."""

import os
import re
import shutil
import subprocess

from ingot.ir.errors import TargetError


def compiler_path() -> str:
    """The C++ compiler: what CXX says, else g++ or clang++; TargetError when there is none."""
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise TargetError(
        "no C++ compiler was found",
        where=f"looked for {', '.join(wanted)}",
        expected="g++ or clang++ on the PATH, or CXX set to one",
        hint="install one, or compile with --backend reference; running an artifact needs none",
    )


def compiler_version() -> str:
    """The first line of what the compiler says of itself."""
    told = subprocess.run([compiler_path(), "--version"], capture_output=True, text=True, check=False).stdout
    return told.partition("\n")[0]


def links_libstdcxx_statically() -> bool:
    """Whether the compiler puts libstdc++ into every library that it links, as wrappers around compilers may. In a
    process that has torch's libstdc++ too, AOTInductor's libraries then crash in std::regex when they are loaded."""
    # The commands that it would run, without running them: g++ and clang++ print these on stderr.
    command = [compiler_path(), "-###", "-shared", "-x", "c++", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr.replace('"', "")
    return re.search(r"-Bstatic\s+-lstdc\+\+|libstdc\+\+\.a\b", told) is not None
