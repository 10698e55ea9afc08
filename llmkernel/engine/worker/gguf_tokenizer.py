"""The tokenizer that a GGUF file describes, written as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.errors import EngineStartupError

__all__ = ["write_tokenizer"]

_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""tokenizer.ggml.pre where each digit is split off before GPT-2's pattern; transformers 5.24 does not know them."""

_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the two files into `folder`. A vocabulary of a kind that `tokenizers` cannot hold is refused by name."""
    metadata = file.metadata
    given = {ours: metadata[key] for name, ours in _KEYS.items() if (key := f"tokenizer.ggml.{name}") in metadata}
    if not given.get("tokens"):
        raise EngineStartupError(f"Cannot load {file.path}: it holds no tokenizer; give one with tokenizer=FOLDER.")
    tokenizer = _convert(file, given)
    if given.get("pre_tokenizer_type") in _DIGITS_APART:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    named = {}
    for name in ("bos", "eos", "unk", "pad"):
        index = given.get(f"{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(given["tokens"]):
            named[f"{name}_token"] = given["tokens"][index]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in named.values() if text not in known])
    # llama.cpp adds BOS to a sentencepiece vocabulary that does not say otherwise
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", given.get("tokenizer_type") == "llama"))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    ends = named.get("bos_token") if add_bos else None, named.get("eos_token") if add_eos else None
    tokenizer.post_processor = _add_ends(tokenizer, *ends)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; a named class would rebuild it
        "clean_up_tokenization_spaces": False,
        "add_bos_token": ends[0] is not None,
        "add_eos_token": ends[1] is not None,
        **named,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def _convert(file: GGUFFile, given: dict[str, Any]) -> Tokenizer:
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer  # 1 s, needed only while converting
    except ImportError:  # transformers before 5.24
        from transformers.integrations.ggml import convert_gguf_tokenizer
    try:
        converted, _ = convert_gguf_tokenizer(file.metadata["general.architecture"], given)
    except Exception as error:  # whatever a broken vocabulary makes transformers or Rust raise
        kind = given.get("tokenizer_type")
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise EngineStartupError(
            f"Cannot load {file.path}: its tokenizer (type {kind!r}) cannot be converted ({reason}); "
            "give another one with tokenizer=FOLDER or a Hub id."
        ) from error
    return converted


def _add_ends(tokenizer: Tokenizer, first: str | None, last: str | None) -> processors.TemplateProcessing:
    """What puts a start token before a text and an end token after it; None adds nothing at that end."""
    tokens = [(text, tokenizer.token_to_id(text)) for text in (first, last) if text]
    before, after = (f"{first}:{{0}} " if first else ""), (f" {last}:{{0}}" if last else "")
    single = before.format(0) + "$A:0" + after.format(0)
    pair = f"{single} {before.format(1)}$B:1{after.format(1)}"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
