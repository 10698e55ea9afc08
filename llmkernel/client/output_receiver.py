"""From the frames of an output message to what waits for it; the same for the sync and the async client."""

from collections.abc import Callable, Sequence
from typing import Any

from llmkernel.client.resources import BackgroundResources
from llmkernel.client.utility_calls import UtilityCalls
from llmkernel.logger import init_logger
from llmkernel.protocol.outputs import (
    EEP_NOTIFICATION_CALL_ID,
    ENGINE_FAULT_CALL_ID,
    EngineCoreOutputs,
    UtilityOutput,
)
from llmkernel.protocol.serial import MsgpackDecoder, WireError

__all__ = ["QUEUE_LIMIT", "OutputReceiver"]

logger = init_logger(__name__)

QUEUE_LIMIT = 64
"""Messages that may wait for `get_output`; what comes then is merged, so that utility answers get through."""


class OutputReceiver:
    """Classifies output messages: the answer to a utility call, a notification, the engine's fault, or outputs.

    notify: called with a notification (elastic expert parallelism); None drops them.
    """

    def __init__(
        self,
        resources: BackgroundResources,
        decoder: MsgpackDecoder,
        utility_results: UtilityCalls,
        notify: Callable[[UtilityOutput], None] | None = None,
    ) -> None:
        self._resources = resources
        self._decoder = decoder
        self._utility_results = utility_results
        self._notify = notify

    def receive(self, frames: "Sequence[Any]") -> EngineCoreOutputs | None:
        """The outputs in `frames`, None if they were something else. EngineDeadError for ENGINE_CORE_DEAD.

        A malformed message is logged and ignored.
        """
        self._resources.validate_alive(frames)
        try:
            outputs: EngineCoreOutputs = self._decoder.decode(frames)
        except WireError as error:
            logger.error("Ignored a malformed output message: %s", error)
            return None
        utility = outputs.utility_output
        if utility is None:
            return outputs
        if utility.call_id == EEP_NOTIFICATION_CALL_ID:
            if self._notify is not None:
                self._notify(utility)
        elif utility.call_id == ENGINE_FAULT_CALL_ID and utility.failure is not None:
            self._resources.record_fault(utility.failure)
        else:
            self._utility_results.process_utility_output(utility)
        return None
