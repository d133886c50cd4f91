"""Write a folder that reproduces a faulty instruction alone.

It holds the call as text, its inputs, the code that computes it, and a script that compares the code with the
reference.
"""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from ingot.debug.bisect.execution.blame_backend import Misstep
from ingot.ir.artifact.plan import Plan
from ingot.ir.json_text import dump_json
from ingot.ir.text import print_program
from ingot.runtime.loading.artifact import Artifact

CALL, INPUTS, INSTRUCTION, EXECUTABLE, SCRIPT = (
    "call.ir",
    "inputs.safetensors",
    "instruction.json",
    "executable.json",
    "reproduce.py",
)
_TEXT = '''"""One instruction against its reference, where Ingot is installed.

Exits with 1 while the fault is present, with 0 when it is gone, and with 2 when the run cannot decide.
"""

import sys
from pathlib import Path

from ingot.reproduce import reproduce

sys.exit(reproduce(Path(__file__).parent))
'''


def write_reproducer(misstep: Misstep, plan: Plan, artifact: Artifact, folder: Path) -> Path:
    """Write a script that runs one faulty instruction of a plan again, with its data. Return the path of the script.

    The files go into `folder`, which is created if needed. `misstep` is the faulty instruction with its inputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CALL).write_text(print_program(misstep.alone), encoding="utf-8")
    save_file({name: tensor.contiguous().clone() for name, tensor in misstep.inputs.items()}, folder / INPUTS)
    instruction = misstep.instruction
    (folder / INSTRUCTION).write_text(dump_json(instruction.model_dump(mode="json")), encoding="utf-8")
    executable = plan.executables.get(instruction.target.removeprefix("exe.")) or plan.libraries.get(
        instruction.backend
    )
    if executable is not None:
        (folder / EXECUTABLE).write_text(dump_json(executable.model_dump(mode="json")), encoding="utf-8")
        for name in executable.files:
            found = [entry.path for entry in artifact.manifest.files if entry.path.endswith(f"/{executable.id}/{name}")]
            shutil.copyfile(artifact.file(found[0]), folder / name)
    (folder / SCRIPT).write_text(_TEXT, encoding="utf-8")
    return folder / SCRIPT
