"""Engines that were kept alive for a kernel, found by their run directories."""

import contextlib
import os
from dataclasses import dataclass

import msgspec

from llmkernel.client.attachment import RunningEngine
from llmkernel.protocol.handshake import EngineHandshakeMetadata
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import live_runs

__all__ = ["KeptEngine", "kept_engines"]


@dataclass(frozen=True)
class KeptEngine:
    """engine: where it is. card: what its kernel called it. init: what it was asked to be."""

    engine: RunningEngine
    card: RunCard
    init: EngineHandshakeMetadata


def kept_engines(kernel: str, base: str | os.PathLike[str] | None = None) -> list[KeptEngine]:
    """Those of the kernel with this identity (see KernelLife), oldest first. base: as in `running_engines`."""
    found = []
    for path in live_runs(base):
        card = RunCard.read(path)
        if card is None or not kernel or card.kernel != kernel:
            continue
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # its end has begun
            init = msgspec.msgpack.decode((path / "init").read_bytes(), type=EngineHandshakeMetadata)
            found.append(KeptEngine(RunningEngine(path, card.pid, card.owner_pid), card, init))
    return sorted(found, key=lambda kept: kept.card.started)
