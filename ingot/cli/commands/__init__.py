"""The commands, one module each. What is slow to import is imported inside a command: `--help` waits for none of it."""

from typing import Annotated

from cyclopts import Parameter

# An option without a value: there, or not.
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
# What most commands take, with its help.
ArtifactFolder = Annotated[str, Parameter(help="An artifact folder.")]
AsJson = Annotated[bool, Parameter(negative="", show_default=False, help="As JSON.")]
