"""The FakeExecutor's tokenizer: ids 0 to 255 are bytes, then a few special tokens, so any text round-trips."""

import json

from llmkernel.protocol.handshake import TokenizerFacts

__all__ = ["EOS_TOKEN_ID", "NUM_TOKENS", "fake_tokenizer_facts"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, 258."""

EOS_TOKEN_ID = 258
NUM_TOKENS = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fake_tokenizer_facts() -> TokenizerFacts:
    """A byte-level BPE without merges, as tokenizer.json, with a ChatML template."""
    return TokenizerFacts(
        json=json.dumps(_tokenizer_json()),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=256,
    )


def _tokenizer_json() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": 256 + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(SPECIAL_TOKENS)
    ]
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it prints, else one from 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 256
    for byte in range(256):
        if byte in printing:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters
