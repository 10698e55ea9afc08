"""EngineDoor: the engine as the control channel sees it, from the first moment of the process to the last."""

import itertools
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmkernel.config import EngineArgs
from llmkernel.engine.departure import Departure
from llmkernel.engine.ownership import Ownership
from llmkernel.protocol.control import FIRST_ATTACHED, Attach, ClientStatus, EngineStatus, Pong
from llmkernel.protocol.handshake import Progress
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import RunDirectory

if TYPE_CHECKING:  # it stands before the engine is imported
    from llmkernel.engine.core_proc import EngineCoreProc

__all__ = ["EngineDoor"]


class EngineDoor:
    """A ControlDoor. Its methods run on the control thread, but for `describe`, `progress` and `open`: those are the
    main thread's, or whichever reports progress.

    Clients may attach while the model loads: they are connected when it is there.

    ownership: a client becomes the owner where there is none any more. starter_left: the process that started this
    engine is gone, and the engine stays.
    """

    def __init__(self, run: RunDirectory, ownership: Ownership, departure: Departure) -> None:
        self._run = run
        self._ownership = ownership
        self.starter_left = False
        self._departure = departure
        self._started = time.monotonic()
        self._args: EngineArgs | None = None
        self._stage: Progress | None = None
        self._lock = threading.Lock()  # attaching here, and opening there
        self._proc: EngineCoreProc | None = None
        self._indices = itertools.count(FIRST_ATTACHED)
        self._attached: dict[int, Attach] = {}

    # What the engine tells.

    def describe(self, args: EngineArgs) -> None:
        """What this engine is to be."""
        self._args = args

    def progress(self, progress: Progress) -> None:
        self._stage = progress

    def open(self, proc: "EngineCoreProc") -> None:
        """The engine takes requests; so do those who attached while it was loading."""
        with self._lock:
            self._proc = proc
            proc.core.scheduler.outbox.owner = self._ownership.client_index
            if self.starter_left:
                self._detach_starter(proc)
            for client_index, client in self._attached.items():
                proc.attach_client(client_index, client.input, client.output)
        self._stage = Progress("ready")

    # What the control channel asks.

    def pong(self) -> Pong:
        proc = self._proc
        return Pong(proc.core.scheduler.step_counter, proc.core.step_age) if proc is not None else Pong(0, 0.0)

    def status(self) -> EngineStatus:
        proc, pong = self._proc, self.pong()
        scheduler = proc.core.scheduler if proc is not None else None
        requests = scheduler.requests.copy() if scheduler is not None else {}  # a copy: the main thread changes it
        unfinished = Counter(request.client_index for request in requests.values())
        state = "running" if proc is not None else "starting"
        return EngineStatus(
            pid=os.getpid(),
            owner_pid=self._ownership.pid,
            model=self._args.model if self._args is not None else "",
            state="stopping" if self._departure.requested else state,
            stage=self._stage,
            uptime=time.monotonic() - self._started,
            memory=_resident_memory(),
            running=len(scheduler.running) if scheduler is not None else 0,
            waiting=len(scheduler.waiting) if scheduler is not None else 0,
            step_counter=pong.step_counter,
            step_age=pong.step_age,
            clients=self._clients(unfinished),
            log=str(self._run.file("log")),
            engine_args=msgspec.to_builtins(self._args) if self._args is not None else {},
            keep_alive=self._ownership.keep_alive,
            lease_left=self._ownership.lease_left,
        )

    def abort(self, request_ids: list[str]) -> None:
        if self._proc is not None:
            self._proc.abort_requests(request_ids)

    def attach(self, client: Attach) -> int:
        """ValueError for an address that is neither a client's in the run directory nor on 127.0.0.1, and for an owner
        where there is one.
        """
        self._check_address(client.input, "i")
        self._check_address(client.output, "o")
        with self._lock:
            for client_index, attached in self._attached.items():
                if attached == client:  # its first question was answered, and nobody heard it
                    return client_index
            if client.owner:
                self._ownership.check_vacant()
            client_index = next(self._indices)
            self._attached[client_index] = client
            if self._proc is not None:
                self._proc.attach_client(client_index, client.input, client.output)
            if client.owner:
                self._install_owner(client_index, client.pid)
        return client_index

    def detach(self, client_index: int) -> None:
        """ValueError for a client that never attached, or has left."""
        with self._lock:
            client = self._attached.pop(client_index, None)
            if client is None:
                raise ValueError(f"client_index = {client_index} is not attached.")
            if self._proc is not None:
                self._proc.detach_client(client_index)
            if client_index == self._ownership.client_index:
                self._ownership.begin_lease()
        for address in (client.input, client.output):  # ZMQ leaves them there
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def starter_is_gone(self) -> None:
        with self._lock:
            self.starter_left = True
            if self._proc is not None:
                self._detach_starter(self._proc)
            self._ownership.begin_lease()

    def keep_alive(self, seconds: float) -> None:
        self._ownership.change_lease(seconds)

    def shutdown(self) -> None:
        self._departure.request()

    def _install_owner(self, client_index: int, pid: int) -> None:
        self._ownership.take(client_index, pid)
        if self._proc is not None:
            self._proc.core.scheduler.outbox.owner = client_index
        card = RunCard.read(self._run.path)
        if card is not None:
            card.owned_by(pid).write(self._run)

    def _detach_starter(self, proc: "EngineCoreProc") -> None:
        for client_index in range(proc.num_owner_clients):
            proc.detach_client(client_index)

    def _clients(self, unfinished: "Counter[int]") -> list[ClientStatus]:
        proc = self._proc
        count = proc.num_owner_clients if proc is not None else 1
        pids = {} if self.starter_left else dict.fromkeys(range(count), self._ownership.pid)
        pids |= {client_index: client.pid for client_index, client in self._attached.items()}
        return [ClientStatus(client_index, pid, unfinished[client_index]) for client_index, pid in pids.items()]

    def _check_address(self, address: str, initial: str) -> None:
        scheme, _, place = address.partition("://")
        if scheme == "tcp":
            host, _, port = place.rpartition(":")
            if host == "127.0.0.1" and port.isdecimal() and 0 < int(port) < 2**16:
                return
        elif scheme == "ipc":
            folder, _, name = place.rpartition("/")
            if folder == str(self._run.path) and re.fullmatch(rf"{initial}[0-9a-f]{{6}}", name):
                return
        raise ValueError(
            f"{address!r} must be {self._run.path}/{initial} with six hexadecimal digits, or a port of 127.0.0.1."
        )


def _resident_memory() -> int:
    import psutil  # lazy: 20 ms that the start of an engine does not pay

    return int(psutil.Process().memory_info().rss)
