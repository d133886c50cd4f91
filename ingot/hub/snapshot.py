"""A commit of a repository on the hub: which files a checkpoint needs, and the folder of the hub's cache that has
them.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import RevisionNotFoundError

from ingot.cli.progress import OnProgress
from ingot.frontend.checkpoint_files import (
    CONFIG,
    CONVERT,
    INDEX,
    PICKLE_SUFFIXES,
    QUANT_CONFIG,
    SINGLE,
    TOKENIZER_FILES,
    name_files,
    read_index,
)
from ingot.hub.download import RemoteFile, download, download_one
from ingot.hub.errors import hub_error, unreached
from ingot.hub.name import HubName
from ingot.ir.errors import CheckpointError, ConfigError, HubError

# Other programs may have cached part of a commit. Without generation_config.json a model samples and stops differently,
# and without tokenizer.json it takes no text, so the cache must record their absence if they are not in it.
_DECISIVE = ("generation_config.json", "tokenizer.json")
# Files to request even if they do not exist, so that the cache records their absence and the hub is not asked again.
_KNOWN = (*_DECISIVE, "tokenizer_config.json", "chat_template.jinja")
# Each repository has this file, and only a download of all files fetches it.
_OF_ALL = ".gitattributes"


@dataclass(frozen=True)
class Snapshot:
    """A commit of the repository `name`, and its folder in the hub's cache.

    `folder` already has config.json, and `fetch` downloads the other files. `listing` describes the commit's files on
    the hub, by name. It is None if only the cache is used. This has one of two reasons. The hub could not be reached
    (`unreached` says why), or a commit was named and the cache has all its files.
    """

    name: HubName
    folder: Path
    listing: Mapping[str, RemoteFile] | None = None
    unreached: str = ""

    @property
    def commit(self) -> str:
        return self.folder.name

    @property
    def origin(self) -> str:
        """Return "org/name@COMMIT". `LLM` and `compile-model` accept this name as a checkpoint."""
        return f"{self.name.repository}@{self.commit}"

    def fetch(self, progress: OnProgress) -> Path:
        """Download the tokenizer's files and the weights if the cache lacks them, and return the snapshot's folder.

        Raises HubError, and CheckpointError for a shard that the repository lacks.
        """
        if self.listing is None:
            self._check_cache()
            return self.folder
        small = [file for file in TOKENIZER_FILES if file in self.listing]
        if INDEX in self.listing:
            if not (self.folder / INDEX).is_file():
                download_one(self._pinned(), INDEX)
            weights = sorted(set(read_index(self.folder / INDEX).values()))
            if absent := [file for file in weights if file not in self.listing]:
                raise CheckpointError(
                    f"{len(absent)} of {len(weights)} shards are not in the repository: {name_files(absent)}",
                    where=f"{INDEX} of {self.origin}",
                    expected="every shard that the index names",
                )
        else:
            weights = [SINGLE]
        # Weights last: once they are present, the cache can be used without the hub.
        download(self.name, self.folder, self.listing, [small, weights], progress)
        return self.folder

    def missing(self) -> list[str]:
        """Return the names of files that the checkpoint needs and the hub's cache lacks. No request is sent to the hub.

        A file of `_DECISIVE` is not needed if, according to the cache, the repository does not have it.
        """
        weights = [SINGLE]
        if (self.folder / INDEX).is_file():
            weights = sorted(set(read_index(self.folder / INDEX).values()))
        lacking = [file for file in weights if not (self.folder / file).is_file()]
        return [
            *self.unknown(_DECISIVE),
            *(f"{SINGLE}, or {INDEX} and its shards" if file == SINGLE else file for file in lacking),
        ]

    def unknown(self, files: Sequence[str]) -> list[str]:
        """Return those of `files` that the hub's cache does not have, and does not record as absent from the
        repository.
        """
        if (self.folder / _OF_ALL).is_file():
            return []
        return [file for file in files if _cached(self._pinned(), file) is None]

    def _check_cache(self) -> None:
        """Raise HubError if the hub could not be reached and the cache lacks a file that the checkpoint needs."""
        missing = self.missing() if self.unreached else []
        if missing:
            raise HubError(
                f"the hub's cache lacks files of '{self.name}', and {self.unreached}; missing: {name_files(missing)}",
                where=str(self.folder),
                expected="each file in the cache, unless the cache knows that the repository does not have it",
                hint="try again with access to the hub; or pass that folder as the checkpoint, if it is complete",
            )

    def _pinned(self) -> HubName:
        return HubName(self.name.repository, self.commit)


def open_snapshot(name: HubName, progress: OnProgress) -> Snapshot:
    """Look up the commit of the revision `name`, and return it as a snapshot. Of its files, only download config.json.

    The hub says which commit the revision is. If the hub cannot be reached, the hub's cache says it. No request is sent
    if `name` has a commit and the cache has all its files. Raises HubError, CheckpointError for a repository without
    safetensors, and ConfigError for one without config.json.
    """
    if name.pinned and (folder := _cached_folder(name)) is not None:
        here = Snapshot(name, folder)
        if not here.missing() and not here.unknown(_KNOWN):
            return here
    progress(f"look for {name} on the hub", 0, 0)
    try:
        commit, listing = _list(name)
    except Exception as error:  # any error of the client and its libraries
        folder = None if isinstance(error, RevisionNotFoundError) else _cached_folder(name)
        if folder is None:
            raise hub_error(error, name) from error
        why = unreached(error, name)
        progress(f"take commit {folder.name[:8]} of {name} from the hub's cache: {why}", 0, 0)
        return Snapshot(name, folder, unreached=why)
    _check_files(listing, name)
    folder = _cached_folder(name)
    if folder is None or folder.name != commit:
        # By the revision, not by the commit, so that the cache records which commit the revision is.
        folder = download_one(name, CONFIG).parent
        if folder.name != commit:  # the revision has moved since
            return open_snapshot(HubName(name.repository, folder.name), progress)
    if QUANT_CONFIG in listing:  # config.json may leave the description of quantized weights to it
        download_one(HubName(name.repository, commit), QUANT_CONFIG)
    for file in _KNOWN:
        if file not in listing:
            _remember_absence(HubName(name.repository, commit), file)
    return Snapshot(name, folder, listing)


def _list(name: HubName) -> tuple[str, dict[str, RemoteFile]]:
    """Request the commit of the revision `name` from the hub. Return the commit's id, and its files by name.

    Raises the errors of huggingface_hub.
    """
    found = HfApi(library_name="ingot").model_info(
        name.repository, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    if found.sha is None or found.siblings is None:
        raise ValueError("the answer has no commit or no files: HF_ENDPOINT may not name a hub")
    files = {
        one.rfilename: RemoteFile(one.size or 0, (one.lfs.sha256 if one.lfs else one.blob_id) or "")
        for one in found.siblings
    }
    return found.sha, files


def _check_files(files: Collection[str], name: HubName) -> None:
    """Raise CheckpointError or ConfigError if Ingot cannot read a repository with these files.

    `files` are their names. `name` is the repository, for the error's message.
    """
    where = f"{constants.ENDPOINT}/{name.repository}"
    if SINGLE not in files and INDEX not in files:
        pickles = [file for file in files if file.endswith(PICKLE_SUFFIXES)]
        gguf = [file for file in files if file.endswith(".gguf")]
        other = [file for file in files if file.endswith(".safetensors")]
        expected = f"{SINGLE}, or {INDEX} and its shards"
        if other:
            raise CheckpointError(
                f"the repository's safetensors are not a transformers checkpoint: {name_files(other)}",
                where=where,
                expected=expected,
                hint="look for a repository of the same model in transformers' form",
            )
        if gguf:
            raise CheckpointError(
                f"the repository's weights are GGUF files: {name_files(gguf)}",
                where=where,
                expected=expected,
                hint="use the repository that they were made from",
            )
        if pickles:
            raise CheckpointError(
                f"the repository's weights are pickle files: {name_files(pickles)}",
                where=where,
                expected=expected,
                hint=f"look for a revision with safetensors, or {CONVERT}",
            )
        raise CheckpointError(
            "the repository holds no weights", where=where, expected=expected, hint=f"found there: {name_files(files)}"
        )
    if CONFIG not in files:
        raise ConfigError(
            f"the repository has no {CONFIG}",
            where=where,
            expected="a checkpoint for transformers",
            hint=f"found there: {name_files(files)}",
        )


def _cached(name: HubName, file: str) -> Path | bool | None:
    """Return the path of a repository's file in the hub's cache.

    Return False if the cache records that the repository lacks the file. Return None if the cache says nothing about
    it.
    """
    found = try_to_load_from_cache(name.repository, file, revision=name.revision)
    return Path(found) if isinstance(found, str) else None if found is None else False


def _cached_folder(name: HubName) -> Path | None:
    """Return the folder of a revision's commit in the hub's cache. The commit is the one of the last lookup.

    Return None if the cache has no such commit, or no config.json of it.
    """
    found = _cached(name, CONFIG)
    return found.parent if isinstance(found, Path) else None


def _remember_absence(pinned: HubName, file: str) -> None:
    """Make the hub's cache record that the commit `pinned` has no file `file`.

    This requests the file from the hub. The failed request leaves the record.
    """
    if _cached(pinned, file) is not None:
        return
    with contextlib.suppress(HubError):  # expected: the cache now records that it does not exist
        download_one(pinned, file)
