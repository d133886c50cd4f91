"""Find where a checkpoint is: in a local folder, or in a commit on the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.hub.name import hub_name

if TYPE_CHECKING:
    from ingot.cli.progress import OnProgress
    from ingot.hub.snapshot import Snapshot


@dataclass(frozen=True)
class Source:
    """A checkpoint, local or on the hub. `folder` has its config.json.

    `snapshot` is the checkpoint's commit on the hub. Its weights may not be downloaded yet. It is None for a local
    checkpoint.
    """

    folder: str | Path
    snapshot: "Snapshot | None" = None

    @property
    def origin(self) -> str:
        """Return the checkpoint's commit on the hub, as "org/name@COMMIT", or "" for a local folder."""
        return "" if self.snapshot is None else self.snapshot.origin

    def fetch(self, progress: "OnProgress") -> str | Path:
        """Return the folder with all files of the checkpoint. Missing files of a hub checkpoint are downloaded first.

        Raises HubError.
        """
        return self.folder if self.snapshot is None else self.snapshot.fetch(progress)


def find_source(checkpoint: str | Path, revision: str | None, progress: "OnProgress") -> Source:
    """Find the checkpoint that the user named: a local folder, or a repository on the hub.

    Of a repository, only config.json is downloaded. `revision` is a branch, tag or commit on the hub. If it is None,
    the revision is the part after "@" in `checkpoint`, or else "main". Raises HubError, CheckpointError, ConfigError
    and OptionError.
    """
    name = hub_name(checkpoint, revision)
    if name is None:
        return Source(checkpoint)
    from ingot.hub.snapshot import open_snapshot  # it imports an HTTP library, which local folders do not need

    snapshot = open_snapshot(name, progress)
    return Source(snapshot.folder, snapshot)
