"""read_tokenizer_facts: what a client needs to build the tokenizer with `tokenizers` and jinja2 alone."""

import hashlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_cache import ModelCache
from llmkernel.engine.worker.model_files import ModelFiles, read_json
from llmkernel.errors import EngineStartupError, InvalidRequestError
from llmkernel.protocol.handshake import TokenizerFacts

__all__ = ["read_tokenizer_facts"]

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def read_tokenizer_facts(files: ModelFiles, args: EngineArgs) -> TokenizerFacts:
    """The tokenizer of the model, or the one of `args.tokenizer` (a folder or a Hub id).

    Ids come from the tokenizer, else from the model's configuration. One that `tokenizers` cannot hold is refused.
    """
    folder = _folder(files, args)
    path = folder / "tokenizer.json"
    if not path.exists():
        path = _convert_slow(folder, args)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise EngineStartupError(f"Cannot read {path}: {_first_line(error)}; download or copy it again.") from error
    config = _optional(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    fallback = _optional(files.folder / "config.json") | _optional(files.folder / "generation_config.json")
    ids = {name: _token_id(tokenizer, special, fallback, name) for name in ("bos", "eos", "pad")}
    changed = _add_lacking(tokenizer, special)
    templates = _chat_templates(folder, config)
    return TokenizerFacts(
        json=tokenizer.to_str() if changed else None,
        path=None if changed else str(path),
        chat_template=templates.pop("default", next(iter(templates.values()), None)),
        special_tokens=special,
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
        named_chat_templates=templates,
    )


def _folder(files: ModelFiles, args: EngineArgs) -> Path:
    if args.tokenizer is None:
        return files.folder
    folder = Path(args.tokenizer).expanduser()
    if folder.is_dir():
        return folder
    from llmkernel.engine.worker import hub  # 0.2 s, only for a tokenizer from the Hub

    if not hub.REPO_ID.fullmatch(args.tokenizer):
        raise InvalidRequestError(
            f"tokenizer = {args.tokenizer!r} is neither a folder nor a Hub id (org/name); give one of them.",
            parameter="tokenizer",
            value=args.tokenizer,
        )
    return hub.fetch(args.tokenizer, None, hub.tokenizer_files, lambda *_: None)


def _convert_slow(folder: Path, args: EngineArgs) -> Path:
    """tokenizer.json made by transformers from an older tokenizer's files, kept in our cache."""
    present = [folder / name for name in _SLOW_FILES if (folder / name).exists()]
    if not present and not args.trust_remote_code:
        raise EngineStartupError(
            f"{folder} has no tokenizer (tokenizer.json); give one with tokenizer=FOLDER or a Hub id."
        )
    where = str(folder.resolve())
    sizes = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in present}
    entry = f"tokenizer-{hashlib.sha256(where.encode()).hexdigest()[:12]}"

    def build(target: Path) -> None:
        _backend(folder, args).save(str(target / "tokenizer.json"))

    identity = {"folder": where, "files": sizes}
    return ModelCache().make(entry, identity, build, needed=64 * 2**20) / "tokenizer.json"


def _backend(folder: Path, args: EngineArgs) -> Tokenizer:
    from transformers import AutoTokenizer  # 1.7 s, only to convert an older tokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # transformers raises nearly anything here
        raise EngineStartupError(
            f"The tokenizer in {folder} cannot be read by transformers ({_first_line(error)}); "
            "give another one with tokenizer=FOLDER or a Hub id."
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise EngineStartupError(
            f"The tokenizer in {folder} ({type(slow).__name__}) has no `tokenizers` back end, which llmkernel needs; "
            "give one that has (a folder with tokenizer.json, or a Hub id) with tokenizer=."
        )
    return backend


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    content = _optional(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    found = {}
    for name in _NAMES:
        value = content.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _token_id(tokenizer: Tokenizer, special: dict[str, str], fallback: dict[str, Any], name: str) -> int | None:
    text = special.get(f"{name}_token")
    found = tokenizer.token_to_id(text) if text is not None else None
    if found is not None:
        return found
    given = fallback.get(f"{name}_token_id")
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, int) else None


def _add_lacking(tokenizer: Tokenizer, special: dict[str, str]) -> bool:
    """Mark special tokens that an older tokenizer.json does not mark, as transformers does; True if there were any."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    lacking = [text for text in special.values() if text not in added and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in lacking])
    return bool(lacking)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, the usual one as "default": from files, else from tokenizer_config.json; {} for a base
    model."""
    given = config.get("chat_template")
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    elif not isinstance(given, dict):
        given = {"default": given}
    files = [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    files.append(("default", folder / "chat_template.jinja"))
    found = given | {name: path.read_text(encoding="utf-8") for name, path in files if path.exists()}
    return {name: source for name, source in found.items() if isinstance(name, str) and isinstance(source, str)}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
