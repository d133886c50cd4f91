"""The commands, one module each. Slow imports are inside the commands, so that `--help` does not wait for them."""

from typing import Annotated

from cyclopts import Parameter

# An option without a value.
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
# Arguments that most commands take, with their help.
# What commands say of a target whose code has never run on such a machine.
UNTRIED = "on hardware: this code was compiled, and has never run on such a GPU"
Variant = Annotated[
    str | None,
    Parameter(help="The variant of a fat artifact, by its target, as in sm_90. Default: the one for this machine."),
]
ArtifactFolder = Annotated[str, Parameter(help="An artifact folder.")]
AsJson = Annotated[bool, Parameter(negative="", show_default=False, help="As JSON.")]
