"""StreamDecoder: token ids to text, piece by piece, so that the pieces join to the decode of the whole."""

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream

from llmkernel.llm.tokenizer import REPLACEMENT, Tokenizer

__all__ = ["StreamDecoder"]

_CONTEXT = 6
"""Tokens before the output that stand in front of its first piece: enough to tell a leading space."""

_MAX_PENDING = 24
"""Tokens that may wait for a character to become whole, before what is certain about them is delivered."""

_MAX_BYTE_RUN = 48
"""Byte tokens that may wait for the end of their run."""

_CONTINUATION = range(0x80, 0xC0)
"""Bytes that stand inside a character of UTF-8."""


class StreamDecoder:
    """Decodes the output of one request as it comes.

    Invariant: with T(ids) the tokenizer's decode, T(prompt + output) == T(prompt) + the pieces, joined with flush(). A
    character that the prompt's last token leaves open belongs to the output; nothing else of the prompt does.

    A piece never ends in half a character. Where a tokenizer falls back to byte tokens, its decoder turns a whole run
    of them into U+FFFD if one is wrong, so a run is delivered when it ends (or is long).
    """

    __slots__ = (
        "_after_special",
        "_backend",
        "_byte_ids",
        "_context",
        "_joined",
        "_junk",
        "_pending",
        "_run",
        "_skip",
        "_skipped_ids",
        "_spoiled",
        "_stream",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """spaces_between_special_tokens False: a special token directly behind another is told without the space that
        some tokenizers put between tokens, so the invariant does not hold for it."""
        self._backend = tokenizer.backend
        self._byte_ids = tokenizer.byte_ids
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._joined: Mapping[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            self._joined = {token_id: text for text, token_id in tokenizer.special_texts.items()}
        self._after_special = False
        self._context: list[int] = []  # tokens whose text is out and stands before that of the pending ones
        self._pending: list[int] = []  # tokens that have not been delivered in full
        self._run: list[int] = []  # the byte tokens at the end of `_pending`, not yet given to the stream
        self._spoiled = False  # the run that goes on is no UTF-8, and what came of it was delivered
        self._skip = 0  # characters at the start of the next piece that are out already
        self._junk = 0  # U+FFFD after these that are the prompt's, if that is what they turn out to be
        self._prime(prompt_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is open, and for a skipped special token."""
        if not self._joined:
            return self._push(token_id)
        joins = self._after_special and not self._pending
        self._after_special = token_id in self._joined
        piece = self._push(token_id)
        return self._joined[token_id] if joins and self._after_special and piece else piece

    def _push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        if token_id in self._byte_ids:
            return self._push_byte(token_id)
        self._spoiled = False
        self._pending.append(token_id)
        if not self._run:
            return self._feed(token_id)
        run, self._run = self._run, []
        return self._feed([*run, token_id])

    def flush(self) -> str:
        """What is still held: half characters as U+FFFD. Nothing is pushed after this."""
        text = self._strip_known(self._pending_text())
        self._context, self._pending, self._run = self._context + self._pending, [], []
        return text

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """Put the end of the prompt before the output."""
        tail: list[int] = []
        run: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id in self._skipped_ids:
                continue
            if not tail and token_id in self._byte_ids:
                run.append(token_id)
            elif len(tail) == _CONTEXT:
                break
            else:
                tail.append(token_id)
        self._restart(tail[::-1])
        if run:
            self._prime_run(run[::-1])

    def _prime_run(self, run: list[int]) -> None:
        """The prompt ends in byte tokens, which the output's first ones may go on with."""
        self._run = run
        whole = self._whole_run_length()
        if len(run) > _MAX_BYTE_RUN:
            if not whole:
                self._run, self._spoiled = [], True
                self._restart(run[-1:], junk=0)
                return
            self._restart([])  # of a long run the end will do, from a whole character on
            start = len(run) - _MAX_BYTE_RUN // 2
            while self._byte(run[start]) in _CONTINUATION:
                start += 1
            self._run = run = run[start:]
        self._pending.extend(run)
        # as the decoder tells it: a space at the very start of a text may be stripped
        before = self._backend.decode(self._context, skip_special_tokens=False)
        after = self._backend.decode([*self._context, *run[: self._whole_run_length()]], skip_special_tokens=False)
        known = len(after) - len(before)
        self._skip += known
        self._junk = len(run) - known

    def _restart(self, tokens: list[int], junk: int = 1) -> None:
        """A new stream after `tokens`, whose text is out but for a half character at the end."""
        self._stream = DecodeStream(ids=tokens, skip_special_tokens=False)
        text = self._backend.decode(tokens, skip_special_tokens=False)
        self._context, self._pending, self._skip, self._junk = list(tokens), [], 0, 0
        if text.endswith(REPLACEMENT):  # the stream takes this for an open character and will repeat all of it
            open_characters = 0 if self._byte_ids else 1
            self._context, self._pending = [], list(tokens)
            self._skip = len(text) - open_characters
            self._junk = junk * open_characters

    def _feed(self, tokens: int | list[int]) -> str:
        try:
            piece = self._stream.step(self._backend, tokens)
        except Exception:  # noqa: BLE001 - the library raises a bare Exception when earlier text would change
            return self._restart_after_change()
        if piece is None:
            return self._deliver_certain() if len(self._pending) >= _MAX_PENDING else ""
        self._context, self._pending = self._pending, []
        return self._strip_known(piece) if self._skip or self._junk else piece

    def _restart_after_change(self) -> str:
        """The text of earlier tokens changed by what came after: keep what is out, go on from here."""
        text = self._strip_known(self._pending_text())
        self._restart((self._context + self._pending)[-_CONTEXT:], junk=0)
        return text[:-1] if self._pending and not self._byte_ids else text

    def _deliver_certain(self) -> str:
        """Of a long wait, deliver all but the last character, which may still become whole."""
        text = self._strip_known(self._pending_text())
        if not text.endswith(REPLACEMENT):
            self._restart((self._context + self._pending)[-_CONTEXT:])
            return text
        self._restart(self._pending[-_CONTEXT:], junk=0)
        return text if self._byte_ids else text[:-1]

    def _push_byte(self, token_id: int) -> str:
        """A byte token waits for the end of its run; of a long run, the whole characters are delivered before."""
        if self._spoiled:
            return REPLACEMENT
        self._pending.append(token_id)
        self._run.append(token_id)
        if len(self._run) < _MAX_BYTE_RUN:
            return ""
        length = self._whole_run_length()
        if not length:  # no UTF-8, so every byte of the run is one U+FFFD, those to come included
            self._spoiled, self._run = True, []
            text = self._strip_known(self._pending_text())
            self._restart(self._pending[-1:], junk=0)
            return text
        ready, self._run = self._run[:length], self._run[length:]
        self._pending = self._pending[: len(self._pending) - len(self._run)]
        piece = self._feed(ready)
        self._pending.extend(self._run)
        return piece

    def _whole_run_length(self) -> int:
        """Byte tokens of the run up to its last whole character; 0 if it is no UTF-8."""
        data = self._run_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            return error.start if error.reason == "unexpected end of data" else 0
        return len(data)

    def _run_bytes(self) -> bytes:
        return bytes(map(self._byte, self._run))

    def _byte(self, token_id: int) -> int:
        return int(str(self._backend.id_to_token(token_id))[3:5], 16)

    def _pending_text(self) -> str:
        """Text of the pending tokens behind their context."""
        before = self._backend.decode(self._context, skip_special_tokens=False)
        whole = self._backend.decode(self._context + self._pending, skip_special_tokens=False)
        if whole.startswith(before):
            return whole[len(before) :]
        common = next((at for at, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), 0)
        others = (at for at, token in enumerate(reversed(self._context)) if token not in self._byte_ids)
        run = next(others, len(self._context))
        spoiled = whole.startswith(REPLACEMENT * run, common)  # by a byte that came after it was delivered
        return whole[common + run * spoiled :]

    def _strip_known(self, text: str) -> str:
        """`text` without what is out already and without the prompt's own U+FFFD."""
        text = text[self._skip :]
        while self._junk and text.startswith(REPLACEMENT):
            text = text[1:]
            self._junk -= 1
        self._skip = self._junk = 0
        return text
