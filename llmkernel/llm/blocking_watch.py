"""BlockingWatch: the EngineWatch of calls that block: it asks in a thread of its own."""

import asyncio
import threading

from llmkernel.llm.engine_watch import EngineWatch

__all__ = ["BlockingWatch"]


class BlockingWatch:
    """Runs `watch` where no loop does. The thread comes with the first silence and goes when nobody waits any more."""

    def __init__(self, watch: EngineWatch) -> None:
        self.watch = watch
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def silence(self) -> None:
        """Somebody waits, and nothing has come for a while. From any thread."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self.watch.heard()
                self._thread = threading.Thread(target=self._run, name="llmkernel-engine-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # not asyncio.run, which somebody may have patched
            runner.run(self.watch.watch())
