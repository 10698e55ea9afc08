"""llmkernel's front end, with the tokenizer of the folder --model."""

import argparse
import platform
from pathlib import Path

from front_end import FrontEnd, serve_front_end

import llmkernel
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.stats import IterationStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts
from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder


def open_front_end() -> FrontEnd:
    """As AsyncLLM puts it together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer.json")
    folder = parser.parse_args().model
    return FrontEnd(
        facts={"version": llmkernel.__version__, "python": platform.python_version()},
        tokenizer=Tokenizer.from_facts(TokenizerFacts(path=str(folder / "tokenizer.json"))),
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
        make_stats=IterationStats.of,
    )


if __name__ == "__main__":
    serve_front_end(open_front_end)
