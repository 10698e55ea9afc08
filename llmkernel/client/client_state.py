"""What the readers of a client work on, tasks of a loop or a thread: it holds no reference to the client itself."""

import asyncio
import queue
from typing import Generic, TypeVar

from llmkernel.client.resources import BackgroundResources
from llmkernel.client.startup import Startup
from llmkernel.client.utility_calls import UtilityCalls
from llmkernel.protocol.outputs import EngineCoreOutputs
from llmkernel.protocol.serial import MsgpackDecoder

__all__ = ["DRAIN_MS", "EXIT_WAIT", "ClientState", "Ended"]

EXIT_WAIT = 0.5
"""Seconds that waiters wait for the exit code of an engine that said it is dead."""

DRAIN_MS = 100
"""How long a socket must be silent, once the process is gone, until nothing more is expected from it."""

Item = EngineCoreOutputs | Exception
Outputs = TypeVar("Outputs", bound=asyncio.Queue[Item] | queue.Queue[Item])


class Ended(Exception):
    """There is nothing more to receive."""


class ClientState(Generic[Outputs]):
    """outputs_queue: what the engine brought, without a limit to its length. concluded: everybody who waited has been
    failed, and the queue holds what came before that, then the error.
    """

    def __init__(
        self,
        resources: BackgroundResources,
        startup: Startup,
        decoder: MsgpackDecoder,
        utility_results: UtilityCalls,
        outputs_queue: Outputs,
    ) -> None:
        self.resources = resources
        self.startup = startup
        self.decoder = decoder
        self.utility_results = utility_results
        self.outputs_queue = outputs_queue
        self.concluded = False

    def conclude(self) -> None:
        """The engine is dead: fail everybody who waits, now."""
        self.resources.record_death()
        if not self.concluded:
            self.concluded = True
            self.utility_results.fail_all(self.resources.dead_error)
            self.outputs_queue.put_nowait(self.resources.dead_error())
