"""A checkpoint on the Hugging Face Hub, read where it lies: headers and single tensors by HTTP range.

    folder = read_hub_folder("hf://nvidia/Kimi-K2.6-NVFP4@main")
    folder.load("model.layers.1.mlp.experts.7.up_proj.weight_scale")    # one request for these bytes
    TRAFFIC.requests, TRAFFIC.bytes                                     # what this process asked for so far

huggingface_hub does the talking (HF_ENDPOINT, HF_TOKEN, retries, the cache). One request lists the repository and its
commit; from then on everything is read of that commit. Config files are downloaded into the local Hub cache; a shard
that the cache holds is read there, any other by ranges that are never stored. When the Hub cannot be reached
(HF_HUB_OFFLINE=1, no network), a snapshot that the cache holds whole is read instead.

The price of not downloading: a request for each tensor. Whoever reads all of a model, or reads it twice, downloads it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not in its list of exports
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from workbench.errors import CheckpointError

from .files import INDEX_NAME, Folder, LocalFiles, read_folder, read_json_object, read_source
from .header import is_usable_name
from .index import Problem, choose_files, parse_index

PARALLEL_HEADERS = 8
MAX_STALLS = 3  # requests in a row that bring no byte before a read is given up
LIST_TIMEOUT_S = 30.0

_NOT_THE_HUB = "{} does not answer as the Hub does ({})"
_CHECK_ENDPOINT = "check HF_ENDPOINT and proxies"
_UNREACHABLE = (
    httpx.TransportError,
    hub_errors.OfflineModeIsEnabled,
    hub_errors.LocalEntryNotFoundError,
)


@dataclass(slots=True)
class Traffic:
    """How much was asked of the Hub. A download is two requests: one for the file's version, one for its bytes."""

    requests: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, requests: int, count: int) -> None:
        with self._lock:
            self.requests += requests
            self.bytes += count

    def __str__(self) -> str:
        return f"{self.requests} requests to the Hub, {self.bytes / 1e6:.1f} MB"


TRAFFIC = Traffic()
"""All that this process asked of the Hub."""


@dataclass(frozen=True, slots=True)
class HubName:
    """`hf://org/name[@revision]`, taken apart. revision: "" is the default branch."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def download_command(self) -> str:
        return f"run `hf download {self.repo}" + (f" --revision {self.revision}`" if self.revision else "`")


def parse_hub_name(path: str | Path) -> HubName:
    """Take `hf://org/name[@revision]` apart (or `hf:/org/name`, as pathlib writes it). Raises CheckpointError."""
    address = re.fullmatch(r"hf:/{1,2}([^/@]+/[^/@]+)(?:@(.+))?", str(path), re.DOTALL)
    try:
        if address is None:
            raise ValueError("expected an organization and a name, and after an @ a revision")
        name, revision = address[1], address[2] or ""
        hf_hub_url(name, "config.json", revision=revision or None)  # the library's own rules for a name
        if not is_usable_name(name + revision) or ".." in revision:
            raise ValueError("it holds characters that no repository has")
    except ValueError as error:
        raise CheckpointError(
            f"{ascii(str(path))[:200]} names no repository: {str(error)[:200]}", fix="write hf://org/name[@revision]"
        ) from error
    return HubName(name, revision)


def read_hub_folder(path: str | Path) -> Folder:
    """A checkpoint on the Hub as a `Folder`, without downloading its weights.

    Raises CheckpointError: a repository or revision that does not exist, a gated one, a Hub that cannot be reached
    while the cache holds no whole snapshot, and everything that `read_folder` raises for.
    """
    name = parse_hub_name(path)
    try:
        with _explained(name):
            TRAFFIC.add(1, 0)
            info = HfApi().model_info(
                name.repo, revision=name.revision or None, files_metadata=True, timeout=LIST_TIMEOUT_S
            )
    except CheckpointError as error:
        if not isinstance(error.__cause__, _UNREACHABLE):
            raise
        try:
            return read_folder(cached_folder(path))
        except CheckpointError as cached:
            raise CheckpointError(f"{error.message}, and {cached.message}", fix=error.fix) from error
    if not isinstance(info.sha, str) or not re.fullmatch("[0-9a-f]{40}", info.sha):
        raise CheckpointError(f"{constants.ENDPOINT} gave no commit for {name}", fix=_CHECK_ENDPOINT)
    siblings = {s.rfilename: s for s in info.siblings or [] if _is_safe(s.rfilename)}
    return read_source(HubFiles(name, info.sha, siblings))


def cached_folder(path: str | Path) -> Path:
    """The local snapshot of `hf://org/name[@revision]`, whole. Servers need it: they read files, not ranges.

    Raises CheckpointError with the download command when the Hub cache does not hold it, or only a part of it.
    """
    name = parse_hub_name(path)
    try:
        snapshot = Path(snapshot_download(name.repo, revision=name.revision or None, local_files_only=True))
    except Exception as error:  # the library raises several unrelated types for "not in the cache"
        raise CheckpointError(
            f"{name} is not in the local Hub cache ({type(error).__name__})", fix=name.download_command
        ) from error
    files = LocalFiles(snapshot)
    problems: list[Problem] = []
    try:
        index_path = files.fetch(INDEX_NAME)
        index = None if index_path is None else parse_index(read_json_object(index_path), files.name)
        choose_files(files.name, files.shards(), index, problems)
        missing = next((p.message for p in problems if p.severity == "error"), "")
    except CheckpointError as error:
        missing = error.message
    if missing:
        raise CheckpointError(f"the local Hub cache holds only a part of {name}: {missing}", fix=name.download_command)
    return snapshot


class HubFiles:
    """One commit of a repository. `Source` says what the methods do."""

    parallel = PARALLEL_HEADERS

    def __init__(self, name: HubName, commit: str, siblings: dict[str, RepoSibling]) -> None:
        self.hub_name = name
        self.commit = commit
        self.name = f"hf://{name.repo}@{commit}"
        self._siblings = siblings
        self._cached: dict[str, LocalFiles | None] = {}
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        config = self.fetch("config.json")
        assert config is not None  # `read_source` asked for it first
        return config.parent

    def names(self) -> list[str]:
        return sorted(self._siblings)

    def shards(self) -> list[str]:
        return [n for n in self.names() if n.endswith(".safetensors") and "/" not in n]

    def size(self, name: str) -> int | None:
        sibling = self._siblings.get(name)
        if sibling is None:
            return None
        if sibling.size is None:
            raise CheckpointError(f"{constants.ENDPOINT} does not tell the size of {name}", fix=_CHECK_ENDPOINT)
        return sibling.size

    def fetch(self, name: str) -> Path | None:
        if name not in self._siblings:
            return None
        cached = self._in_cache(name)
        if cached is not None:
            return cached.fetch(name)
        with _explained(self.hub_name):
            path = hf_hub_download(self.hub_name.repo, name, revision=self.commit)
        TRAFFIC.add(2, self.size(name) or 0)
        with self._lock:
            self._cached.pop(name, None)  # it is there now
        return Path(path)

    def read_into(self, name: str, view: memoryview, position: int, what: str) -> None:
        cached = self._in_cache(name)
        if cached is not None:
            cached.read_into(name, view, position, what)
            return
        done, stalls = 0, 0
        while done < len(view):
            count = self._read_range(name, view[done:], position + done, what)
            stalls = 0 if count else stalls + 1
            if stalls > MAX_STALLS:
                raise CheckpointError(
                    f"the connection broke {stalls} times while {what} was read from {self.name}/{name}",
                    fix=f"try again, or {self.hub_name.download_command}",
                )
            done += count

    def content_hash(self, name: str) -> str:
        sibling = self._siblings[name]
        return (sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id) or ""

    def close(self) -> None:
        for files in self._cached.values():
            if files is not None:
                files.close()

    def _in_cache(self, name: str) -> LocalFiles | None:
        """The cached snapshot, where it holds `name`."""
        with self._lock:
            if name not in self._cached:
                found = try_to_load_from_cache(self.hub_name.repo, name, revision=self.commit)
                snapshot = Path(found).parents[name.count("/")] if isinstance(found, str) else None
                self._cached[name] = None if snapshot is None else LocalFiles(snapshot)
            return self._cached[name]

    def _read_range(self, name: str, view: memoryview, position: int, what: str) -> int:
        """Ask for the bytes of `view` once; how many came before the connection broke, if it did."""
        url = hf_hub_url(self.hub_name.repo, name, revision=self.commit)
        headers = {
            **build_hf_headers(),
            "Range": f"bytes={position}-{position + len(view) - 1}",
            "Accept-Encoding": "identity",
        }
        done = 0
        with (
            _explained(self.hub_name),
            http_stream_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response,
        ):
            hf_raise_for_status(response)
            self._check_range(response, name, position, len(view), what)
            try:
                for chunk in response.iter_raw():
                    taken = chunk[: len(view) - done]
                    view[done : done + len(taken)] = taken
                    done += len(taken)
                    if done == len(view):
                        break
            except httpx.TransportError:
                pass  # the caller asks for what is missing
        TRAFFIC.add(1, done)
        return done

    def _check_range(self, response: httpx.Response, name: str, position: int, count: int, what: str) -> None:
        """Before a body is read: is it the range asked for, of the file that was listed?"""
        size = self.size(name)
        if response.status_code == 200 and position == 0 and count == size:
            return  # the whole file was asked for
        if response.status_code != 206:
            raise CheckpointError(
                f"{response.url.host} ignores the Range header: status {response.status_code} for {count} bytes of"
                f" {name} (for {what})",
                fix=self.hub_name.download_command,
            )
        range_given = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", range_given)
        if match is None or int(match[1]) != position or int(match[2]) >= position + count:
            raise CheckpointError(
                f"{response.url.host} sent the range {range_given[:80]!r} of {name}, asked for bytes"
                f" {position}-{position + count - 1}",
                fix=self.hub_name.download_command,
            )
        if match[3] not in ("*", str(size)):
            raise CheckpointError(
                f"{self.name}/{name} has {match[3]} bytes, the repository lists {size}: truncated or replaced",
                fix="try again later, or tell the repository's owner",
            )


def _is_safe(name: str) -> bool:
    """Whether a file that a repository lists lies within it."""
    return is_usable_name(name) and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """What the library raises, as a CheckpointError with the way out."""
    endpoint = constants.ENDPOINT
    try:
        yield
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: its owner grants access",
            fix=f"ask for access at {endpoint}/{name.repo}, then `hf auth login` (or HF_TOKEN)",
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{endpoint} has no model {name.repo}, or it is private",
            fix="check the name; for a private one `hf auth login` (or HF_TOKEN)",
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name.repo} has no revision {name.revision!r}", fix="give a branch, a tag or a commit that it has"
        ) from error
    except _UNREACHABLE as error:
        offline = isinstance(error, hub_errors.OfflineModeIsEnabled)
        raise CheckpointError(
            f"{endpoint} cannot be reached ({'HF_HUB_OFFLINE is set' if offline else type(error).__name__})",
            fix=f"check the network and HF_ENDPOINT; with a network, {name.download_command}",
        ) from error
    except hub_errors.FileMetadataError as error:
        raise CheckpointError(_NOT_THE_HUB.format(endpoint, error), fix=_CHECK_ENDPOINT) from error
    except hub_errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise CheckpointError(
            f"{endpoint} answered {status} for {name}", fix=f"try again, or {name.download_command}"
        ) from error
    except CheckpointError:
        raise
    except OSError as error:  # the cache: disk full, no permission
        raise CheckpointError(
            f"cannot use the Hub cache {constants.HF_HUB_CACHE}: {error}", fix="free space there, or set HF_HUB_CACHE"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # not JSON, or not what the Hub's API says
        raise CheckpointError(_NOT_THE_HUB.format(endpoint, type(error).__name__), fix=_CHECK_ENDPOINT) from error
