"""The factories that pick a client: in this process or with an engine process, blocking or async."""

from collections.abc import Mapping

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.attachment import RunningEngine
from llmkernel.client.engine_core_client import EngineCoreClient
from llmkernel.client.keep_alive import KeepAlive, check_keep_alive
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.errors import UnsupportedFeatureError

__all__ = ["EngineCoreClient", "make_async_mp_client", "make_client"]


def make_client(
    multiprocess_mode: bool,
    asyncio_mode: bool,
    args: EngineArgs,
    executor_class: str | None = None,
    log_stats: bool = True,
    engine: RunningEngine | None = None,
) -> EngineCoreClient:
    """The client for a mode: in this process, or an engine process with blocking or async methods.

    engine: one that runs already, to attach to in place of starting one.

    asyncio without an engine process is refused (NotImplementedError): its steps would block the loop.
    """
    if asyncio_mode and not multiprocess_mode:
        raise UnsupportedFeatureError(
            "asyncio without an engine process is not supported; set multiprocess_mode=True.",
            parameter="multiprocess_mode",
        )
    if engine is not None and not multiprocess_mode:
        raise UnsupportedFeatureError("engine= needs multiprocess_mode=True.", parameter="multiprocess_mode")
    if engine is None:
        check_keep_alive(args, None)
    if asyncio_mode:
        return make_async_mp_client(args, executor_class, log_stats, engine=engine)
    if multiprocess_mode:
        return SyncMPClient(args, executor_class, log_stats, engine=engine)
    from llmkernel.client.inproc_client import InprocClient  # lazy: brings the engine's code into this process

    return InprocClient(args, executor_class, log_stats)


def make_async_mp_client(
    args: EngineArgs,
    executor_class: str | None = None,
    log_stats: bool = True,
    client_addresses: Mapping[str, str] | None = None,
    client_index: int = 0,
    client_count: int = 1,
    engine: RunningEngine | None = None,
    keep: KeepAlive | None = None,
) -> EngineCoreClient:
    """An AsyncMPClient; the subclass for several data-parallel engines is not built and refused by name.

    engine: one that runs already, to attach to in place of starting one. keep: see MPClient.
    """
    if engine is None:
        check_keep_alive(args, keep)
    if args.data_parallel_size > 1:
        raise UnsupportedFeatureError(
            "data_parallel_size above 1 is not built yet; leave it out.", parameter="data_parallel_size"
        )
    return AsyncMPClient(args, executor_class, log_stats, client_addresses, client_index, client_count, engine, keep)
