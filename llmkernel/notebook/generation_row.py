"""GenerationRow: one prompt of a generation, and the answers to it so far."""

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from llmkernel.errors import LLMKernelError, RequestFailedError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.notebook.markdown_safety import safe_markdown
from llmkernel.notebook.prompts import Prompt, Sent
from llmkernel.notebook.settings import sampling_params
from llmkernel.protocol.handshake import ModelFacts

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["GenerationRow"]


class GenerationRow:
    """One prompt to one model. submitted: when, by the monotonic clock. slot: the model. output: the deltas joined so
    far. error: why it failed. facts: of the model as it was when the request was sent.
    """

    def __init__(self, request_id: str, slot: "ModelSlot", prompt: Prompt, options: Mapping[str, Any]) -> None:
        """`options`: merged settings."""
        self.request_id = request_id
        self.submitted = time.monotonic()
        self.slot = slot
        self.prompt = prompt
        self.output: RequestOutput | None = None
        self.error: Exception | None = prompt.error
        self.facts: ModelFacts | None = None
        self.done = prompt.error is not None
        self._options = options
        self._aborted = False
        self._markdown: dict[int, tuple[int, str]] = {}

    @property
    def answers(self) -> list[CompletionOutput]:
        """n answers in order, empty ones where nothing has come."""
        count = self._options.get("n", 1)
        known = {answer.index: answer for answer in self.output.outputs} if self.output else {}
        end = "error" if self.error is not None else "abort" if self._aborted else None
        answers = [known.get(index) or CompletionOutput(index, "", []) for index in range(count)]
        if end is None:
            return answers
        return [
            answer if answer.finish_reason else dataclasses.replace(answer, finish_reason=end) for answer in answers
        ]

    async def stream(self, llm: AsyncLLM, notes: list[str]) -> AsyncIterator[RequestOutput]:
        """Send the request; its outputs as they come. A remark for people is added to `notes`, once."""
        assert llm.facts is not None  # it is ready
        self.facts = llm.facts.model
        if self.prompt.again is not None:
            async for output in self._stream_again(llm, self.prompt.again[self.slot.name], notes):
                yield output
            return
        params = sampling_params(self._options, llm.facts.model)
        priority = self._options.get("priority", 0)
        template = self._options.get("template")
        if self._options.get("raw") and template is None:
            outputs = llm.generate(self.prompt.text, params, self.request_id, priority=priority)
        else:
            await _note_special_tokens(llm, [*self.messages[:1], self.messages[-1]], notes)
            outputs = llm.chat(self.messages, params, self.request_id, chat_template=template, priority=priority)
        async for output in outputs:
            yield output

    @property
    def sent(self) -> Sent | None:
        """The request as it was sent; None if it was not."""
        output, facts = self.output, self.facts
        if output is None or facts is None or output.sampling_params is None:
            return None
        return Sent(output.prompt, list(output.prompt_token_ids or ()), output.sampling_params, facts)

    async def _stream_again(self, llm: AsyncLLM, sent: Sent, notes: list[str]) -> AsyncIterator[RequestOutput]:
        """Send what was sent before."""
        if self.facts != sent.facts:
            notes.append(f"{self.slot.name} was loaded in another way then: the tokens may differ; compare the cards.")
        prompt: dict[str, Any] = {"prompt_token_ids": sent.token_ids}
        if sent.prompt is not None:
            prompt["prompt"] = sent.prompt
        priority = self._options.get("priority", 0)
        async for output in llm.generate(prompt, sent.params.clone(), self.request_id, priority=priority):
            yield output

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The conversation: a system message if there is one, earlier turns, then the prompt as the user's turn."""
        system = self._options.get("system")
        start = [{"role": "system", "content": system}] if system else []
        return [*start, *self.prompt.before, {"role": "user", "content": self.prompt.text}]

    def markdown_of(self, answer: CompletionOutput) -> str:
        """Its text as safe Markdown, made once for each length."""
        length, markdown = self._markdown.get(answer.index, (0, ""))
        if length != len(answer.text):
            markdown = safe_markdown(answer.text)
            self._markdown[answer.index] = len(answer.text), markdown
        return markdown

    def take(self, output: RequestOutput) -> None:
        """Join the next delta."""
        if self.output is None:
            self.output = output
        else:
            self.output.add(output, aggregate=True)
        self.done = self.output.finished
        failed = [answer for answer in self.output.outputs if answer.finish_reason == "error"]
        if self.done and failed:
            reason = failed[0].stop_reason or "no reason was given"
            self.error = RequestFailedError(
                f"The request failed in the engine: {reason}", request_id=self.request_id, partial=self.output
            )

    def fail(self, error: Exception) -> None:
        """The request has failed. An error of ours is kept without its traceback, whose frames hold the engine's client
        for as long as the answer is remembered.
        """
        if not self.done:
            self.error = error.with_traceback(None) if isinstance(error, LLMKernelError) else error
            self.done = True

    def abort(self) -> None:
        if not self.done:
            self._aborted = self.done = True


async def _note_special_tokens(llm: AsyncLLM, messages: list[Mapping[str, str]], notes: list[str]) -> None:
    found = await llm.special_tokens_in(messages)
    note = f"{', '.join(found)} in the prompt was sent as the special token." if found else ""
    if note and note not in notes:
        notes.append(note)
