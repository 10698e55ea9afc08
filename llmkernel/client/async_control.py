"""Questions to an engine's control channel from an event loop: no thread waits for the answer."""

import asyncio
from typing import Any

import zmq
import zmq.asyncio

from llmkernel.client.control_client import STUCK_AFTER, EngineStuckError, pack_question, unpack_answer
from llmkernel.protocol.control import Question
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["ask"]


async def ask(
    address: str,
    question: Question,
    kind: type[Any] | None = None,
    timeout: float = STUCK_AFTER,  # noqa: ASYNC109 - what the exception speaks of
    key: CurveKey | None = None,
) -> Any:
    """The engine's answer, of type `kind`. EngineStuckError after `timeout` seconds; InvalidRequestError if it refuses.

    key: as ControlClient's. Owns its context, so that nobody who ends another one waits for this.
    """
    ctx = zmq.asyncio.Context()
    try:
        socket = make_zmq_socket(ctx, address, zmq.DEALER, bind=False, linger=0, key=key)
        await socket.send_multipart(pack_question(question))
        async with asyncio.timeout(timeout):
            frames = await socket.recv_multipart()
    except TimeoutError:
        raise EngineStuckError.after(timeout) from None
    finally:
        ctx.destroy(linger=0)
    return unpack_answer(frames, kind)
