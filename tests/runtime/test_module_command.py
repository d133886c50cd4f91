"""Child processes import from where their parent does, whatever the working folder holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.runtime.module_command import module_command


def test_a_child_imports_nothing_from_the_working_folder_that_its_parent_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "this.py").write_text("print('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])

    def printed() -> str:
        return subprocess.run(module_command("this"), capture_output=True, text=True, check=True).stdout

    assert "Beautiful is better than ugly" in printed(), "the library's module"
    for here in ("", os.getcwd()):
        monkeypatch.setattr(sys, "path", [here, *sys.path])
        assert printed() == "mine\n", "the parent would import it, too"
        monkeypatch.setattr(sys, "path", sys.path[1:])


def test_arguments_come_last() -> None:
    assert module_command("one.two", "3", "4")[-4:] == ["-m", "one.two", "3", "4"]
