"""The commands, one module each. Slow imports are inside the commands, so that `--help` does not wait for them."""

from typing import Annotated

from cyclopts import Parameter

# An option without a value.
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
# Arguments that most commands take, with their help.
ArtifactFolder = Annotated[str, Parameter(help="An artifact folder.")]
AsJson = Annotated[bool, Parameter(negative="", show_default=False, help="As JSON.")]
