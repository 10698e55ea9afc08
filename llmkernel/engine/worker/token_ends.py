"""add_ends: the post-processor that puts a start token before a text, an end token after it, or both."""

from tokenizers import Tokenizer, processors

__all__ = ["add_ends"]


def add_ends(tokenizer: Tokenizer, first: str | None, last: str | None) -> processors.TemplateProcessing:
    """Both tokens must be in the vocabulary of `tokenizer`; None adds nothing at that end."""
    tokens = [(text, tokenizer.token_to_id(text)) for text in (first, last) if text]
    before, after = (f"{first}:{{0}} " if first else ""), (f" {last}:{{0}}" if last else "")
    single = before.format(0) + "$A:0" + after.format(0)
    pair = f"{single} {before.format(1)}$B:1{after.format(1)}"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
