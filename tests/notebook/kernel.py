"""A real ipykernel for tests: cells are run through jupyter_client, and every message they cause is kept."""

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager

__all__ = ["Cell", "Kernel", "running_kernel"]


@dataclasses.dataclass
class Cell:
    """What one execution gave. messages: (seconds since the start, iopub message). seconds: until the reply."""

    status: str
    ename: str
    evalue: str
    seconds: float
    messages: list[tuple[float, dict[str, Any]]]

    def of_type(self, *types: str) -> list[dict[str, Any]]:
        return [message["content"] for _, message in self.messages if message["msg_type"] in types]

    @property
    def stdout(self) -> str:
        return "".join(content["text"] for content in self.of_type("stream") if content["name"] == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(content["text"] for content in self.of_type("stream") if content["name"] == "stderr")

    @property
    def traceback(self) -> str:
        return "\n".join(line for content in self.of_type("error") for line in content["traceback"])

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Final content of every display, updates applied."""
        shown: list[dict[str, Any]] = []
        by_id: dict[str, int] = {}
        for content in self.of_type("display_data", "update_display_data", "execute_result"):
            display_id = content.get("transient", {}).get("display_id", "")
            if display_id in by_id:
                shown[by_id[display_id]] = content
            else:
                by_id[display_id or str(len(shown))] = len(shown)
                shown.append(content)
        return shown

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The displays that hold generations."""
        return [content for content in self.displays if "llmkernel" in content["metadata"]]


class Kernel:
    """One kernel process; `run` executes a cell and waits for it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env=_environment(folder) | environment)
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid  # type: ignore[union-attr, attr-defined]

    def start(self, code: str) -> str:
        """Send a cell; its message id."""
        return self.client.execute(code, store_history=True)

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def run(self, code: str, *, timeout: float = 30, interrupt_when: Any = None) -> Cell:
        """Run a cell to its end. interrupt_when: called with each message; True interrupts the kernel, once."""
        return self.finish(self.start(code), timeout=timeout, interrupt_when=interrupt_when)

    def run_in_page(self, code: str, *, timeout: float = 30) -> Cell:
        """Run a cell as a notebook page does: the request names the cell, so that widgets are shown."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = self.client.session.msg("execute_request", content, metadata={"cellId": "c1"})
        self.client.shell_channel.send(message)
        return self.finish(message["header"]["msg_id"], timeout=timeout)

    def next(self, wanted: Any, *, timeout: float = 20) -> dict[str, Any]:
        """The next message for which `wanted(message)` holds, whatever caused it."""
        return next(message for message in self._messages(time.monotonic() + timeout) if wanted(message))

    def finish(self, message_id: str, *, timeout: float = 30, interrupt_when: Any = None) -> Cell:
        """Wait until the cell is done; messages of earlier cells are dropped."""
        started, messages, interrupted = time.monotonic(), [], 0.0
        for message in self._messages(started + timeout):
            if message["parent_header"].get("msg_id") != message_id:
                continue
            messages.append((time.monotonic() - started, message))
            if interrupt_when is not None and not interrupted and interrupt_when(message):
                interrupted = time.monotonic()
                self.interrupt()
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        ended = time.monotonic()
        reply = self._reply(message_id)
        seconds = ended - (interrupted or started)
        return Cell(reply["status"], reply.get("ename", ""), reply.get("evalue", ""), seconds, messages)

    def more(self, message_id: str, until: Any, *, timeout: float = 20) -> list[dict[str, Any]]:
        """Further messages of a cell that is done, up to the first for which `until(message)` holds."""
        found = []
        for message in self._messages(time.monotonic() + timeout):
            if message["parent_header"].get("msg_id") == message_id:
                found.append(message)
                if until(message):
                    return found
        raise AssertionError("The message did not come.")

    def value(self, expression: str) -> Any:
        """The value of an expression, by repr and eval."""
        reply = self.client.execute_interactive(
            "",
            user_expressions={"value": f"({expression})"},
            output_hook=lambda _: None,
            timeout=20,
            store_history=False,
        )
        result = reply["content"]["user_expressions"]["value"]
        assert result["status"] == "ok", result
        return eval(result["data"]["text/plain"])

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, *, now: bool = True) -> None:
        """Start it again with its old connection file. now: it is killed first; else asked to end."""
        self._manager.restart_kernel(now=now)
        self.client.wait_for_ready(timeout=60)

    def stop(self) -> None:
        """Shut the kernel down as a server does; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        while True:
            try:
                yield self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError("The cell does not end.") from None

    def _reply(self, message_id: str) -> dict[str, Any]:
        while True:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == message_id:
                content: dict[str, Any] = reply["content"]
                return content


@contextlib.contextmanager
def running_kernel(folder: Path, *cells: str, **environment: str) -> Iterator[Kernel]:
    """A kernel in `folder`, after running `cells`."""
    kernel = Kernel(folder, **environment)
    try:
        for code in cells:
            cell = kernel.run(code)
            assert cell.status == "ok", (code, cell)
        yield kernel
    finally:
        kernel.stop()


def _environment(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    own = {"IPYTHONDIR": str(folder / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1", "OMP_NUM_THREADS": "1"}
    return environment | own
