"""GrammarCompiler: compiles grammars beside the step loop, each distinct one once."""

import contextlib
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

import msgspec

from llmkernel.engine.structured.grammar import Grammar, GrammarBackend, GrammarError
from llmkernel.engine.structured.structured_request import StructuredRequest
from llmkernel.logger import init_logger
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.structured_outputs import StructuredOutputsParams

__all__ = ["GrammarCompiler"]

logger = init_logger(__name__)

TIMEOUT = 30.0
"""Seconds after which a request no longer waits for its grammar."""

CACHE_SIZE = 64
"""Compiled grammars that are kept for requests to come."""

_Job = Callable[[], None]


class GrammarCompiler:
    """Owns the back end, the threads and the compiled grammars; all begin with the first structured request.

    make_backend: builds the back end, in a thread. on_done: called, in a thread, when a grammar is ready or has failed.
    Compiling lets go of the GIL, so the steps of others go on. A grammar that takes longer than `timeout` seconds fails
    its requests; its thread, one of a few, is lost until the library gives up, which its limits make sure of.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        end_token_ids: Sequence[int],
        on_done: Callable[[], None] = lambda: None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        self.on_done = on_done
        self._make_backend = make_backend
        self._end_token_ids = list(end_token_ids)
        self._timeout = timeout
        self._backend: GrammarBackend | None = None
        self._backend_failure: GrammarError | None = None
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, params: SamplingParams) -> StructuredRequest | None:
        """Start to compile what `params` ask for, None if that is nothing. Safe in any thread; returns at once."""
        if params.structured_outputs is None:
            return None
        return StructuredRequest(
            self._future(params.structured_outputs), self._end_token_ids if params.ignore_eos else ()
        )

    def shutdown(self) -> None:
        """Let the threads end; those that compile are not waited for."""
        for _ in self._threads:
            self._jobs.put(None)

    def _future(self, params: StructuredOutputsParams) -> "Future[Grammar]":
        key = msgspec.msgpack.encode(params)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None and not (found.done() and found.exception()):
                self._compiled.move_to_end(key)
                return found
            future: Future[Grammar] = Future()
            self._compiled[key] = future
            if len(self._compiled) > CACHE_SIZE:
                self._compiled.popitem(last=False)
            self._start_threads()
        timer = threading.Timer(self._timeout, self._give_up, (future,))
        timer.daemon = True
        timer.start()
        future.add_done_callback(lambda _: timer.cancel())
        future.add_done_callback(lambda _: self.on_done())
        self._jobs.put(lambda: self._compile(params, future))
        return future

    def _start_threads(self) -> None:
        if not self._threads:
            for number in range(max(1, (os.cpu_count() or 1) // 2)):
                thread = threading.Thread(target=self._work, name=f"llmkernel-grammar-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _compile(self, params: StructuredOutputsParams, future: "Future[Grammar]") -> None:
        try:
            _settle(future, self._ready_backend().compile(params))
        except GrammarError as error:
            _settle(future, GrammarError(f"structured_outputs.{params.kind} cannot be used: {error}."))
        except Exception as error:  # whatever the library raises is this request's alone
            logger.exception("Compiling a grammar raised.")
            _settle(future, GrammarError(f"structured_outputs.{params.kind} cannot be used: {error!r}."))

    def _ready_backend(self) -> GrammarBackend:
        """Built once; if that fails, it has failed for good."""
        with self._backend_lock:
            if self._backend_failure is not None:
                raise self._backend_failure
            if self._backend is None:
                try:
                    self._backend = self._make_backend()
                except GrammarError as error:
                    self._backend_failure = error
                    raise
            return self._backend

    def _give_up(self, future: "Future[Grammar]") -> None:
        reason = f"The grammar of structured_outputs took more than {self._timeout:g} s to compile; make it simpler."
        _settle(future, GrammarError(reason))


def _settle(future: "Future[Grammar]", outcome: Grammar | GrammarError) -> None:
    """The first outcome counts: a grammar may come after its time."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, GrammarError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
