"""What the client tests share: clients of a fake engine, requests, and what a process holds."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.protocol.outputs import EngineCoreOutput
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

FAKE_EXECUTOR = "llmkernel.engine.fake_executor:FakeExecutor"


def make_async_client(model: str = "fake:step_ms=0", **args: Any) -> AsyncMPClient:
    return AsyncMPClient(EngineArgs(model=model, **args), FAKE_EXECUTOR)


def make_sync_client(model: str = "fake:step_ms=0", **args: Any) -> SyncMPClient:
    return SyncMPClient(EngineArgs(model=model, **args), FAKE_EXECUTOR)


def make_request(request_id: str, prompt: Sequence[int] = (1, 2, 3), **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, list(prompt), None, SamplingParams(**params), None, time.time(), None, None, None
    )


async def collect(client: AsyncMPClient, *request_ids: str) -> dict[str, list[EngineCoreOutput]]:
    """Everything that is said about these requests until each has ended."""
    found: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    async with asyncio.timeout(30):
        while open_ids:
            for output in (await client.get_output_async()).outputs:
                found[output.request_id].append(output)
                if output.finished:
                    open_ids.remove(output.request_id)
    return found


def collect_sync(client: Any, *request_ids: str) -> dict[str, list[EngineCoreOutput]]:
    """As `collect`, for a blocking client."""
    found: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    while open_ids:
        for output in client.get_output().outputs:
            found[output.request_id].append(output)
            if output.finished:
                open_ids.remove(output.request_id)
    return found


async def begin(client: AsyncMPClient, request_id: str, **params: Any) -> None:
    """Send a request and wait for its first output."""
    await client.add_request_async(make_request(request_id, **params))
    async with asyncio.timeout(30):
        while not any(o.request_id == request_id for o in (await client.get_output_async()).outputs):
            pass


def begin_sync(client: Any, request_id: str, **params: Any) -> None:
    """As `begin`, for a blocking client."""
    client.add_request(make_request(request_id, **params))
    while not any(output.request_id == request_id for output in client.get_output().outputs):
        pass


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def wait_gone(pid: int, timeout: float) -> float:
    """Wait until process `pid` has ended; seconds that it took. TimeoutError after `timeout`.

    A zombie of ours counts as a process: it was not reaped. One that init has to reap does not.
    """
    started = time.monotonic()
    while time.monotonic() - started < timeout:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
                return time.monotonic() - started
        except psutil.NoSuchProcess:
            return time.monotonic() - started
        time.sleep(0.005)  # another process's end cannot be awaited everywhere
    raise TimeoutError(f"process {pid} is still there after {timeout} s")


def open_descriptors() -> list[str]:
    """Names of the open files and sockets of this process."""
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return names


def num_threads() -> int:
    """Threads of this process as the system counts them, ZMQ's included."""
    return len(os.listdir("/proc/self/task"))


def run_directories(base: Path) -> list[str]:
    return sorted(path.name for path in base.glob("llmk-*"))
