"""IncrementalDetokenizer: ids and text of one answer as they grow, and the stop strings in it (engine.md B.9)."""

from collections.abc import Sequence

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.stop_strings import StopStrings
from llmkernel.llm.stream_decoder import StreamDecoder
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.requests import EngineCoreRequest

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Text and ids of one answer, in step: tokens after the one that completes a stop string are dropped.

    The text equals the decode of all ids (see StreamDecoder), cut at the first stop string. What may be the beginning
    of a stop string is held back while the answer runs, and delivered if it turns out to be none.
    """

    __slots__ = (
        "_decoder",
        "_delivered",
        "_include_stop",
        "_min_tokens",
        "_search_from",
        "_stops",
        "output_text",
        "token_ids",
    )

    def __init__(
        self,
        decoder: StreamDecoder | None,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.token_ids: list[int] = []
        self.output_text = ""
        self._decoder = decoder
        self._stops = StopStrings(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._search_from = 0  # where the text of the tokens after min_tokens begins
        self._delivered = 0  # characters that next_text(delta=True) gave out

    @classmethod
    def from_new_request(cls, tokenizer: Tokenizer | None, request: EngineCoreRequest) -> "IncrementalDetokenizer":
        """For one request; without a tokenizer, or with detokenize=False, the text stays empty."""
        params = request.sampling_params
        if params is None or tokenizer is None or not params.detokenize:
            if params is not None and params.stop_strings:
                raise InvalidRequestError(
                    "stop needs a tokenizer, and this model has none; use stop_token_ids.", parameter="stop"
                )
            return cls(None)
        decoder = StreamDecoder(
            tokenizer,
            request.prompt_token_ids or (),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return cls(
            decoder,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        """Take in the tokens of a step; the stop string that the text now ends in, if there is one.

        stop_terminated: the engine ended the answer at a stop token, the last of these; its text is left out unless
        stop strings are to be included.
        """
        if self._decoder is None:
            self.token_ids.extend(new_token_ids)
            return None
        hidden = len(new_token_ids) - 1 if stop_terminated and not self._include_stop else -1
        for position, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if position == hidden:
                break
            piece = self._decoder.push(token_id)
            if piece:
                stop = self._append(piece)
                if stop is not None:
                    return stop
            elif self._stops and len(self.token_ids) <= self._min_tokens:
                self._search_from = len(self.output_text)
        return None

    def flush(self) -> str | None:
        """The answer is finished: let out half characters. The stop string, if that completes one."""
        piece = self._decoder.flush() if self._decoder is not None else ""
        return self._append(piece) if piece else None

    def next_text(self, *, finished: bool, delta: bool) -> str:
        """The text to show: all of it, or what is new since the last call; without what must be held back."""
        end = len(self.output_text)
        if self._stops and not finished and not self._include_stop:
            end -= self._stops.held(self.output_text, self._search_from)
        if not delta:
            return self.output_text if end == len(self.output_text) else self.output_text[:end]
        start, self._delivered = self._delivered, end
        return self.output_text[start:end]

    def _append(self, piece: str) -> str | None:
        known = len(self.output_text)
        self.output_text += piece
        if not self._stops:
            return None
        if len(self.token_ids) <= self._min_tokens:
            self._search_from = len(self.output_text)
            return None
        match = self._stops.find(self.output_text, known, self._search_from)
        if match is None:
            return None
        self.output_text = self.output_text[: match.end if self._include_stop else match.start]
        return match.stop
