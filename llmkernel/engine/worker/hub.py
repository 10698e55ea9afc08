"""A model's files from the Hugging Face Hub, by huggingface_hub: its cache, its token, HF_ENDPOINT, HF_HUB_OFFLINE."""

import errno
import glob
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import tqdm as hub_tqdm

from llmkernel.config import format_bytes
from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.model_folder import find_weights
from llmkernel.errors import EngineStartupError, InvalidRequestError, LLMKernelError

__all__ = ["REPO_ID", "fetch", "find_cached", "select_files", "tokenizer_files"]

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_SMALL = re.compile(r"[^/]+\.(json|jinja|tiktoken|model)|vocab\.txt|merges\.txt|additional_chat_templates/[^/]+\.jinja")
_CODE = re.compile(r"[^/]+\.py")
_POLL_SECONDS = 0.2
_TIMEOUT = 20.0

Select = Callable[[list[str]], list[str]]


def select_files(where: str, trust: bool, gguf: str | None = None) -> Select:
    """Which files of a repository are fetched: weights of one kind, configuration, tokenizer; code only if trusted."""

    def select(names: list[str]) -> list[str]:
        if gguf is not None:
            if gguf not in names:
                found = ", ".join(name for name in names if name.lower().endswith(".gguf")) or "none"
                raise EngineStartupError(f"{where} has no file {gguf}; its GGUF files: {found}.")
            return [gguf]
        weights = find_weights(names, where, trust)
        if weights.kind == "gguf":
            return weights.names
        return (
            weights.names
            + [name for name in tokenizer_files(names) if name not in weights.names]
            + ([name for name in names if _CODE.fullmatch(name)] if trust else [])
        )

    return select


def tokenizer_files(names: list[str]) -> list[str]:
    """Configuration and tokenizer files, weights left out."""
    return [name for name in names if _SMALL.fullmatch(name)]


def find_cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot folder in the local Hugging Face cache, whole or not; the network is not asked."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    commit = revision or constants.DEFAULT_REVISION
    ref = root / "refs" / commit
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else commit)
    return folder if folder.is_dir() else None


def fetch(repo: str, revision: str | None, select: Select, report: ReportProgress) -> Path:
    """The snapshot folder of `repo` with the files that `select` picks; what is cached is not fetched again.

    Progress is stage "download", in bytes. Gated, missing, offline, no space: EngineStartupError with one line each.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    api = huggingface_hub.HfApi(endpoint=endpoint)
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except Exception as error:  # the HTTP library, and so its errors, differ between versions of huggingface_hub
        cached = find_cached(repo, revision) if _unreachable(error) else None
        if cached is None or not _holds(cached, select):
            raise _explain(error, repo, revision, endpoint) from error
        return cached
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    wanted = select(sorted(sizes))
    total = sum(sizes[name] for name in wanted if not _cached_file(repo, name, info.sha))
    if _free() < total:
        raise _no_space(repo, total)

    def tell(done: int) -> None:
        if total:
            report("download", min(done, total), total, repo)

    try:
        tell(0)
        folder = _Download(repo, revision, endpoint, wanted).wait(tell)
        tell(total)
    except Exception as error:  # as above
        raise _explain(error, repo, revision, endpoint, total) from error
    return Path(folder)


class _Download:
    """One snapshot_download in a thread of its own; progress is told in the caller's thread."""

    def __init__(self, repo: str, revision: str | None, endpoint: str, wanted: list[str]) -> None:
        self._options: dict[str, Any] = {
            "repo_id": repo,
            "revision": revision,
            "endpoint": endpoint,
            "allow_patterns": [glob.escape(name) for name in wanted],
            "tqdm_class": self._counting_bar(),
        }
        self._bytes: dict[int, float] = {}  # by progress bar: newer versions count a file's bytes on two
        self._ended = threading.Event()
        self._folder = ""
        self._error: BaseException | None = None

    def wait(self, tick: Callable[[int], None]) -> str:
        """The snapshot's folder; `tick(bytes so far)` is called now and then until it is there."""
        threading.Thread(target=self._run, name="hub-download", daemon=True).start()
        while not self._ended.wait(_POLL_SECONDS):
            tick(int(max(self._bytes.values(), default=0)))
        if self._error is not None:
            raise self._error
        return self._folder

    def _run(self) -> None:
        try:
            self._folder = huggingface_hub.snapshot_download(**self._options)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            self._error = error
        finally:
            self._ended.set()

    def _counting_bar(self) -> type[hub_tqdm]:
        download = self

        class CountingBar(hub_tqdm):
            """Counts bytes and draws nothing."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._counts = kwargs.get("unit") == "B"
                super().__init__(*args, **kwargs | {"disable": True})

            def update(self, n: float | None = 1) -> None:
                if self._counts:
                    download._bytes[id(self)] = download._bytes.get(id(self), 0) + (n or 0)

        return CountingBar


def _cached_file(repo: str, name: str, revision: str | None) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(repo, name, revision=revision), str)


def _holds(folder: Path, select: Select) -> bool:
    """Whether a snapshot that was fetched before holds a model; what it lacks then is told when it is opened."""
    try:
        return bool(select(sorted(path.name for path in folder.iterdir() if path.exists())))
    except EngineStartupError:
        return False


def _free() -> int:
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _no_space(repo: str, needed: int) -> EngineStartupError:
    return EngineStartupError(
        f"Not enough disk space for {repo} in {constants.HF_HUB_CACHE}: {format_bytes(needed)} needed, "
        f"{format_bytes(_free())} free; free some, or set HF_HOME to a folder on a larger disk."
    )


def _unreachable(error: Exception) -> bool:
    """No answer at all, or one that says nothing about the model (a proxy, a Hub in trouble)."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status == 429


def _explain(error: Exception, repo: str, revision: str | None, endpoint: str, needed: int = 0) -> Exception:
    """One line for what huggingface_hub raised; our own errors stay as they are."""
    if isinstance(error, LLMKernelError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return EngineStartupError(
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, then log in (hf auth login, or set HF_TOKEN)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidRequestError(
            f"{repo} has no revision {revision!r}; leave revision out, or give a branch, a tag or a commit.",
            parameter="revision",
            value=revision,
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError) or status == 404:
        return InvalidRequestError(
            f"There is no model {repo!r} at {endpoint}; check the name (a private one needs HF_TOKEN).",
            parameter="model",
            value=repo,
        )
    if status in (401, 403):
        return EngineStartupError(
            f"{endpoint} refuses {repo} (HTTP {status}); check the token (hf auth whoami, or HF_TOKEN) and its rights."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(repo, needed)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return EngineStartupError(
            f"{repo} is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set; unset it, or give a folder."
        )
    what = f"answered HTTP {status}" if status else f"cannot be reached ({type(error).__name__})"
    return EngineStartupError(
        f"{repo} is not in the local Hugging Face cache, and {endpoint} {what}; "
        "check the network (or HF_ENDPOINT) and try again, or give a local folder or .gguf file."
    )
