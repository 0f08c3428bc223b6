"""Snapshots of models on the Hugging Face Hub: files of one commit in the local cache, and nothing that is code.

The cache, the token and the endpoint are those of huggingface_hub: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. Several processes of a node may download the same model: huggingface_hub locks each file, so that
every file is downloaded once per node.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto.errors import ModelLoadError, first_line

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

DESCRIPTION_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHT_FILES = ("*.safetensors",)
# Folders hold copies in other formats, except those of sentence-transformers' modules, for example 2_Dense.
# `consolidated` files hold the same weights under the names of another library.
_IGNORED_FILES = ("[!0-9]*/*", "*/*/*", "consolidated*")

# ORG/NAME as the hub allows it.
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Files under Git LFS are named by their SHA-256 in the cache; others by their Git object id.
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_ATTEMPTS = 2
LOG_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Files of one commit of a model.

    Attributes:
        path: the directory of the files.
        commit: 40 hexadecimal digits.
    """

    path: Path
    commit: str


def is_model_id(text: str) -> bool:
    """Return whether the text has the form ORG/NAME. A relative path may have it, too."""
    return _MODEL_ID.fullmatch(text) is not None


def find_commit(model_id: str, revision: str | None) -> str:
    """Return the commit that a branch or tag names now; without a connection, the one that the cache knows.

    Args:
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        ModelLoadError: there is no such model or revision, or no access to it.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    return _download(model_id, revision, ("config.json",)).commit


def download_model(model_id: str, revision: str | None = None, *, with_weights: bool = True) -> Snapshot:
    """Return the model's files, after downloading those that the cache lacks. Shows progress on stderr.

    Args:
        revision: a branch, tag or commit; None for the main branch.
        with_weights: leave out the weights if False, for processes that need the configuration and the tokenizer.

    Raises:
        ModelLoadError: there is no such model or revision, no access to it, no connection to the hub, no room on
            the disk, or a file is not what the hub announced.
    """
    patterns = DESCRIPTION_FILES + (WEIGHT_FILES if with_weights else ())
    return _download(model_id, revision, patterns)


def _download(model_id: str, revision: str | None, patterns: Sequence[str]) -> Snapshot:
    # Takes 0.2 s, which a model directory does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    fetch: Any = partial(
        snapshot_download,
        model_id,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(_IGNORED_FILES),
        library_name="quire",
        tqdm_class=download_bar(model_id),
    )
    try:
        try:
            listed = fetch(dry_run=True, tqdm_class=download_bar(model_id, is_shown=False))
            missing = [file for file in listed if file.will_download]
        except DryRunError:  # the hub cannot be reached: the cache may have everything
            missing = []
        _check_room(model_id, missing)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            path = Path(fetch())
            if not (corrupt := _delete_corrupt(path, missing)):
                return Snapshot(path, path.name)
            _log.warning("%s: download %d of %s is corrupt", model_id, attempt, " and ".join(corrupt))
    except ModelLoadError:
        raise
    except Exception as error:  # huggingface_hub also passes on the errors of its HTTP client and of the disk
        raise ModelLoadError(f"{_name(model_id, revision)}: {_explain(error)}") from error
    raise ModelLoadError(
        f"{_name(model_id, revision)}: {' and '.join(corrupt)} had another SHA-256 than the hub announced in "
        f"{_MAX_ATTEMPTS} downloads; check the connection, or a proxy in it"
    )


def _check_room(model_id: str, missing: Sequence[DryRunFileInfo]) -> None:
    """Raises ModelLoadError if the cache's disk has no room for the files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    num_bytes = sum(file.file_size or 0 for file in missing)
    if not num_bytes:
        return
    folder = Path(HF_HUB_CACHE).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    num_free = shutil.disk_usage(folder).free
    if num_bytes > num_free:
        raise ModelLoadError(
            f"{model_id} needs {num_bytes / 1e9:.1f} GB in {folder}, where {num_free / 1e9:.1f} GB are free; "
            "set HF_HOME to a folder on a larger disk"
        )
    _log.info("downloading %s: %d files, %.2f GB, into %s", model_id, len(missing), num_bytes / 1e9, folder)


def _delete_corrupt(path: Path, downloaded: Sequence[DryRunFileInfo]) -> list[str]:
    """Delete downloaded files whose content is not what the hub announced, and return their names."""
    corrupt = []
    for file in downloaded:
        link = path / file.filename
        blob = link.resolve()
        if _SHA256.fullmatch(blob.name) and _sha256(blob) != blob.name:
            corrupt.append(file.filename)
            link.unlink()
            blob.unlink(missing_ok=True)
    return corrupt


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _explain(error: Exception) -> str:
    """Return the problem and its remedy in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "is gated; accept its terms on the hub, and set HF_TOKEN to a token of your account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not on {constants.ENDPOINT}, or is private and HF_TOKEN gives no access to it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision; --revision takes a branch, tag or commit"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.IncompleteSnapshotError):
        reason = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        )
        return (
            f"is not completely in the cache {constants.HF_HUB_CACHE}, and {reason}; download it with "
            "`quire download`, or copy the cache from another machine"
        )
    return f"the download failed: {first_line(error)}"


def _name(model_id: str, revision: str | None) -> str:
    return model_id if revision is None else f"{model_id} at revision {revision}"


def download_bar(model_id: str, *, is_shown: bool = True) -> type[Any]:
    """Return the class of bars for `tqdm_class` of huggingface_hub.

    Args:
        is_shown: draw the bars on a terminal; False for calls that only ask which files there are.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if is_shown and sys.stderr.isatty():
        return tqdm

    class LoggedProgress(tqdm):
        """A bar that is not drawn. Logs the bytes that have arrived."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Bytes are counted twice: as they arrive, and as they are written.
            self._counts_bytes = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(
                ".transfer"
            )
            self._logged_at = time.monotonic()
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.total = kwargs.get("total")  # tqdm sets no attributes of bars that are disabled
            self._num_done = 0.0

        def update(self, n: float | None = 1) -> None:
            self._num_done += n or 0
            now = time.monotonic()
            if self._counts_bytes and now - self._logged_at >= LOG_INTERVAL_S:
                self._logged_at = now
                _log.info("%s: %.2f of %.2f GB", model_id, self._num_done / 1e9, (self.total or 0) / 1e9)

    return LoggedProgress
