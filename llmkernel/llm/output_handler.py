"""The output handler: the task of an AsyncLLM between the client's queue and the queues of the requests."""

import asyncio

from llmkernel.client.core_client import EngineCoreClient
from llmkernel.errors import EngineDeadError
from llmkernel.llm.engine_watch import EngineWatch
from llmkernel.llm.loggers import StatLogger
from llmkernel.llm.loop_end import LoopEnd
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.stats import IterationStats
from llmkernel.logger import init_logger

__all__ = ["OUTPUT_CHUNK", "handle_outputs"]

logger = init_logger(__name__)

OUTPUT_CHUNK = 128
"""Request outputs that are processed before the loop gets a turn."""


async def handle_outputs(
    engine_core: EngineCoreClient,
    output_processor: OutputProcessor,
    stat_logger: StatLogger | None,
    watch: EngineWatch,
) -> None:
    """Take what the engine sends to the queues of its requests, for ever.

    Holds no reference to the AsyncLLM, so that a forgotten one is collected. When it ends, for whatever reason, every
    request that still runs hears of it.
    """

    def leave() -> None:
        """The loop ends, or nobody holds the AsyncLLM any more."""
        ids = list(output_processor.request_states)
        output_processor.propagate_error(
            EngineDeadError("The AsyncLLM of this request is gone, or its event loop; keep it while you read.")
        )
        engine_core.leave(ids)  # type: ignore[attr-defined]  # of AsyncMPClient

    try:
        with LoopEnd(leave):
            while True:
                outputs = await engine_core.get_output_async()
                watch.heard()
                items = outputs.outputs
                iteration_stats = IterationStats.of(outputs) if stat_logger is not None and items else None
                for start in range(0, len(items), OUTPUT_CHUNK):
                    if start:
                        await asyncio.sleep(0)
                    chunk = items[start : start + OUTPUT_CHUNK] if len(items) > OUTPUT_CHUNK else items
                    processed = output_processor.process_outputs(chunk, outputs.timestamp, iteration_stats)
                    if processed.reqs_to_abort:
                        await engine_core.abort_requests_async(processed.reqs_to_abort)
                output_processor.update_scheduler_stats(outputs.scheduler_stats)
                if stat_logger is not None:
                    stat_logger.record(outputs.scheduler_stats, iteration_stats)
    except asyncio.CancelledError:
        leave()
        watch.close()
        raise
    except Exception as error:  # whatever ends this must reach every stream that waits
        if not isinstance(error, EngineDeadError):
            logger.exception("The output handler ended.")
        output_processor.propagate_error(error)
