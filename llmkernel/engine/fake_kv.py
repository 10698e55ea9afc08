"""FakeKVCache: a record of what was written into every KV slot, in place of tensors."""

from collections.abc import Sequence

from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["FakeKVCache", "FakeRequest", "FakeStepError"]


class FakeStepError(RuntimeError):
    """The step asks for what cannot be right: an error of the scheduler, found."""


class FakeRequest:
    """What a worker keeps of a request. token_ids: prompt and output. names: per position, what its KV depends on."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        eos_token_id: int | None,
        block_ids: list[int],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.eos_token_id = eos_token_id
        self.block_ids = block_ids
        self.token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.names: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    def name_tokens(self) -> list[int]:
        """Names of all positions so far. KV at a position depends on every token up to it, and so does its name."""
        name = self.names[-1] if self.names else 0
        for token_id in self.token_ids[len(self.names) :]:
            name = hash((name, token_id))
            self.names.append(name)
        return self.names

    def name_drafts(self, drafts: Sequence[int]) -> list[int]:
        """Names of tokens behind all positions so far, which may never become its own."""
        names, name = [], self.name_tokens()[-1]
        for token_id in drafts:
            name = hash((name, token_id))
            names.append(name)
        return names


class FakeKVCache:
    """Slot -> name of the position whose KV was written there last, 0 for none. Block 0 is nobody's."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._slots = [[0] * block_size for _ in range(num_blocks)]

    def verify(self, request: FakeRequest) -> None:
        """FakeStepError unless every token before num_computed_tokens has its KV in the request's blocks."""
        names, size = request.name_tokens(), self._block_size
        if request.num_computed_tokens >= len(names):
            raise FakeStepError(f"{request.request_id} is scheduled, but nothing of it is left to compute.")
        for index in range(-(-request.num_computed_tokens // size)):
            expected = names[index * size : min((index + 1) * size, request.num_computed_tokens)]
            if self._slots[self._block_id(request, index)][: len(expected)] != expected:
                raise FakeStepError(f"{request.request_id}: block {index} does not hold the KV that it should.")

    def write(self, request: FakeRequest, num_tokens: int, drafts: Sequence[int] = ()) -> None:
        """Compute `num_tokens` tokens from num_computed_tokens on, drafts included. FakeStepError without a block."""
        names, size = request.name_tokens() + request.name_drafts(drafts), self._block_size
        end = request.num_computed_tokens + num_tokens
        if num_tokens < 1 or end > len(names) or (drafts and end != len(names)):
            raise FakeStepError(f"{request.request_id}: {num_tokens} tokens scheduled, not one of those left.")
        for position in range(request.num_computed_tokens, end):
            block_id = self._block_id(request, position // size)
            self._slots[block_id][position % size] = names[position]

    def _block_id(self, request: FakeRequest, index: int) -> int:
        if index >= len(request.block_ids):
            raise FakeStepError(f"{request.request_id} has {len(request.block_ids)} blocks, block {index} is needed.")
        block_id = request.block_ids[index]
        if not 0 < block_id < self._num_blocks:
            raise FakeStepError(f"{request.request_id}: block id {block_id} is outside of the pool.")
        return block_id
