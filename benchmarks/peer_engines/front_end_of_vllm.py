"""vLLM's front end (V1), with the tokenizer of the folder --model."""

import argparse
import platform

import vllm
from front_end import FrontEnd, serve_front_end
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


def open_front_end() -> FrontEnd:
    """As vLLM's AsyncLLM puts it together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    return FrontEnd(
        facts={"version": vllm.__version__, "python": platform.python_version()},
        tokenizer=get_tokenizer(parser.parse_args().model),
        request=EngineCoreRequest,
        output=EngineCoreOutput,
        outputs=EngineCoreOutputs,
        finish_reason=FinishReason,
        sampling_params=SamplingParams,
        output_kind=RequestOutputKind,
        processor=OutputProcessor,
        collector=RequestOutputCollector,
        encoder=MsgpackEncoder,
        decoder=MsgpackDecoder,
        make_stats=lambda _: IterationStats(),
    )


if __name__ == "__main__":
    serve_front_end(open_front_end)
