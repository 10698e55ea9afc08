"""Small tokenizers of the kinds that models use, trained or put together here, and SmolLM2's where it is at hand."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts

_CORPUS = [
    "hello world, this is a test of streams: naïve café, 東京 and 😀. don't stop! it's 3.14 ...",
    "def f(x):\n\treturn x ** 2  # spaces   and tabs\n",
    'Ελληνικά и русский, العربية; a b c <tag> \\n "quotes" it \' s',
] * 20
_SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=_SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: "▁" for the space, byte tokens for what is not in the vocabulary."""
    vocab = {token: token_id for token_id, token in enumerate(["<unk>", *_SPECIAL])}
    for piece in [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abehlo",
        "▁a",
        "▁he",
        "llo",
        "▁▁",
        "é",
        "東",
        "�",
        "\n",
    ]:
        vocab.setdefault(piece, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(_SPECIAL)
    return backend


def trained_byte_fallback() -> tokenizers.Tokenizer:
    """A trained BPE over "▁" and Latin letters; everything else is spelled in byte tokens."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    latin = ["hello world, this is a test of streams: don't stop! it's 3.14 ...", "def f(x): return x ** 2"] * 20
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = trained.normalizer
    backend.decoder = byte_fallback().decoder
    backend.add_special_tokens(_SPECIAL)
    return backend


def metaspace_byte_fallback() -> tokenizers.Tokenizer:
    """As Gemma's and Mistral's converted ones: byte fallback, then Metaspace."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", *_SPECIAL], show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *_SPECIAL], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def smollm2() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))


def smollm2_folder() -> Path:
    """Where the default model lies once it was loaded; the folder need not exist."""
    base = os.environ.get("LLMKERNEL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "llmkernel"
    return Path(base).expanduser() / "smollm2"


def _kinds() -> dict[str, Callable[[], tokenizers.Tokenizer]]:
    made = [byte_level, byte_fallback, metaspace_byte_fallback, word_piece, unigram]
    if (smollm2_folder() / "tokenizer.json").exists():
        made.append(smollm2)
    return {make.__name__: make for make in made}


KINDS = _kinds()


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    backend = KINDS[kind]()
    eos = backend.token_to_id("</s>")
    return Tokenizer(backend, TokenizerFacts(bos_token_id=backend.token_to_id("<s>"), eos_token_id=eos))


def chat_template_of_smollm2() -> str:
    config = json.loads((smollm2_folder() / "tokenizer_config.json").read_text("utf-8"))
    return str(config["chat_template"])
