"""A program that owns an engine: the tests start it with a mode; it prints the engine's pid and does what that says.

A third argument says how it leaves while the engine loads, or once it is told to while the engine steps.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs

FAKE_EXECUTOR = "llmkernel.engine.fake_executor:FakeExecutor"


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece, whoever else writes


def start(model: str) -> SyncMPClient:
    client = SyncMPClient(EngineArgs(model=model), os.environ.get("TEST_EXECUTOR", FAKE_EXECUTOR))
    assert client.process is not None
    say("engine", client.process.pid)
    return client


def wait_for_the_end() -> None:
    say("waiting")
    sys.stdin.read()


def leave(way: str) -> None:
    if way == "exit":
        sys.exit(0)
    if way == "os_exit":
        os._exit(3)
    raise SystemError("on purpose")


def main() -> None:
    mode, model, *ways = sys.argv[1:]
    if mode == "thread":  # the engine must not be tied to the life of the thread that starts it
        clients: list[SyncMPClient] = []
        starter = threading.Thread(target=lambda: clients.append(start(model)))
        starter.start()
        starter.join()
        clients[0].ready()
        wait_for_the_end()
        return
    if mode in ("async", "async_exit"):
        asyncio.run(async_main(model, wait=mode == "async"))
        return
    client = start(model)
    if mode == "loading":
        client.add_progress_callback(lambda progress: say("stage", progress.stage))
        for way in ways:
            client.add_progress_callback(lambda progress, way=way: progress.stage == "weights" and leave(way))
        client.ready()
    client.ready()
    if mode == "forked" and os.fork() == 0:  # the sibling inherits the pipe's end and holds it
        say("sibling", os.getpid())
        time.sleep(60)
        os._exit(0)
    if mode == "bare_fork" and ctypes.CDLL(None).fork() == 0:  # native code, which knows nothing of Python's fork hooks
        say("sibling", os.getpid())
        time.sleep(60)
        os._exit(0)
    if mode == "stepping":
        from tests.client.fake_engine import make_request

        client.add_request(make_request("long", max_tokens=10))
        for way in ways:
            say("waiting")
            sys.stdin.readline()
            leave(way)
    if mode == "leaving":  # its engine does not answer, so this takes its time
        os.kill(client.process.pid, signal.SIGSTOP)
        client.shutdown(timeout=60)
    if mode in ("exit", "os_exit", "raise"):
        leave(mode)
    if mode == "fork_child_exits":
        fork_child_exits(client)
    wait_for_the_end()


async def async_main(model: str, *, wait: bool) -> None:
    client = AsyncMPClient(EngineArgs(model=model), FAKE_EXECUTOR)
    assert client.process is not None
    say("engine", client.process.pid)
    await client.ready()
    if not wait:  # the client is still there when the loop ends, and when the interpreter does
        globals()["kept"] = client
        return
    say("waiting")
    await asyncio.to_thread(sys.stdin.read)


def fork_child_exits(client: SyncMPClient) -> None:
    """The child tries everything, then leaves as a Python program does, with all its exit hooks."""
    from llmkernel.errors import EngineDeadError
    from tests.client.fake_engine import make_request

    child = os.fork()
    if child == 0:
        for call in (client.ensure_alive, lambda: client.add_request(make_request("a"))):
            try:
                call()
            except EngineDeadError as error:
                say("child:", error)
        client.abort_requests(["a"])
        say("child shutdown:", client.shutdown())
        del client
        sys.exit(0)
    os.waitpid(child, 0)
    say("parent:", client.call_utility("is_sleeping"))


if __name__ == "__main__":
    main()
