"""From the frames of an input message to what the busy loop takes; what makes no sense is logged and dropped."""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from llmkernel.engine.request import Request
from llmkernel.logger import init_logger
from llmkernel.protocol.requests import EngineCoreRequest, EngineCoreRequestType
from llmkernel.protocol.serial import Buffer, MsgpackDecoder, WireError

__all__ = ["InputDecoder", "RefusedRequest", "bare_request"]

logger = init_logger(__name__)

_CLIENT_INDEX = EngineCoreRequest.__struct_fields__.index("client_index")


@dataclasses.dataclass(frozen=True)
class RefusedRequest:
    """An ADD that the engine cannot take: its client hears `reason`, nobody else hears anything."""

    request: EngineCoreRequest
    reason: str


def bare_request(request_id: str, client_index: int) -> EngineCoreRequest:
    """Just enough of a request to tell its client that it was refused."""
    return EngineCoreRequest(request_id, [], None, None, None, 0.0, None, None, None, client_index=client_index)


class InputDecoder:
    """Decodes input messages; belongs to the input thread. ADD has a typed decoder, everything else an untyped one.

    preprocess: EngineCore.preprocess_add_request. clients: the indices that have an output socket; they come and go.
    """

    def __init__(self, preprocess: Callable[[EngineCoreRequest], Request], clients: Container[int]) -> None:
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._generic_decoder = MsgpackDecoder()
        self._preprocess = preprocess
        self._clients = clients

    def decode(self, frames: "Sequence[Any]") -> tuple[EngineCoreRequestType, Any] | None:
        """(type, request) for the input queue, or None for a message that makes no sense."""
        try:
            type_frame, *data_frames = frames
            request_type = EngineCoreRequestType(bytes(type_frame.buffer))
            if request_type is EngineCoreRequestType.ADD:
                return request_type, self._decode_add(data_frames)
            return request_type, self._decode_other(request_type, data_frames)
        except (ValueError, msgspec.ValidationError) as error:  # WireError is a ValueError
            logger.error("Ignored a malformed message of %d frames: %s", len(frames), error)
            return None

    def _decode_add(self, frames: Sequence[Buffer]) -> Request | RefusedRequest:
        try:
            request = self._add_decoder.decode(frames)
        except WireError as error:
            return self._refuse_malformed(frames, error)
        self._check_client(request.client_index)
        try:
            return self._preprocess(request)
        except Exception as error:  # that request's problem only: its client hears the reason
            logger.exception("Could not take request %s.", request.request_id)
            return RefusedRequest(request, str(error) or type(error).__name__)

    def _refuse_malformed(self, frames: Sequence[Buffer], error: WireError) -> RefusedRequest:
        """An answer for an ADD that says at least whose it is; otherwise the WireError goes on."""
        fields = self._generic_decoder.decode(frames)
        if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
            raise error
        client_index = fields[_CLIENT_INDEX] if len(fields) > _CLIENT_INDEX else 0
        self._check_client(client_index)
        return RefusedRequest(bare_request(fields[0], client_index), str(error))

    def _decode_other(self, request_type: EngineCoreRequestType, frames: Sequence[Buffer]) -> Any:
        payload = self._generic_decoder.decode(frames)
        if request_type is EngineCoreRequestType.ABORT:
            return msgspec.convert(payload, list[str])
        if request_type is EngineCoreRequestType.UTILITY:
            call = msgspec.convert(payload, tuple[int, int, str, list[Any]])
            self._check_client(call[0])
            return call
        if request_type is EngineCoreRequestType.START_DP_WAVE:
            return msgspec.convert(payload, tuple[int, int | None])
        raise WireError(f"{request_type.name} does not travel.")

    def _check_client(self, client_index: object) -> None:
        if not isinstance(client_index, int) or client_index not in self._clients:
            raise WireError(f"client_index {client_index!r}: there is no such client.")
