"""`llmkernel`: the shell command. Answers go to stdout, everything else to stderr.

Exit codes: 0, 1 the engine or the request failed, 2 a mistake in the command, 130 interrupted.
"""
# ruff: noqa: T201 - printing is what a shell command does

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from llmkernel import __version__
from llmkernel.cli_engines import add_engine_verbs
from llmkernel.cli_models import add_model_verbs
from llmkernel.config import DEFAULT_MODEL, EngineArgs
from llmkernel.errors import InvalidRequestError, LLMKernelError, RequestFailedError
from llmkernel.notebook.load_line import stage_line
from llmkernel.notebook.plain_text import clean_text

if TYPE_CHECKING:
    from llmkernel.llm.async_llm import AsyncLLM
    from llmkernel.llm.outputs import RequestOutput

__all__ = ["main"]

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
WIPE = "\r\x1b[K"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except InvalidRequestError as error:
        return _fail(error, 2)
    except LLMKernelError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)  # what had come is on stdout already
        return 130
    except BrokenPipeError:  # the reader has gone: `llmkernel generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmkernel", description="Local models, from a shell.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"llmkernel {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    generate = verbs.add_parser("generate", help="answer a prompt, streaming to stdout", allow_abbrev=False)
    generate.add_argument("prompt", help="the prompt; - reads it from stdin")
    generate.add_argument(
        "-m", "--model", default=DEFAULT_MODEL, help=f"short name, Hub id, folder, GGUF ({DEFAULT_MODEL})"
    )
    generate.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer in tokens (512)")
    generate.add_argument("-t", "--temperature", type=float, metavar="T", help="0 = greedy (the model's own)")
    generate.add_argument("-p", "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that sum to P")
    generate.add_argument("-k", "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    generate.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest")
    generate.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    generate.add_argument("--stop", action="append", metavar="S", help="end before this text; may be repeated")
    generate.add_argument("--system", metavar="TEXT", help="system message")
    generate.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    generate.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    generate.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    generate.add_argument("--quiet", action="store_true", help="no progress, no remarks")
    generate.set_defaults(run=lambda arguments: asyncio.run(_generate(arguments)))
    add_model_verbs(verbs)
    add_engine_verbs(verbs)
    return parser


async def _generate(arguments: argparse.Namespace) -> int:
    from llmkernel.llm.async_llm import AsyncLLM  # lazy: --help need not wait for tokenizers and jinja2
    from llmkernel.notebook.model_slot import executor_class_for
    from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise InvalidRequestError("The prompt is empty; write one.", parameter="prompt")
    asked = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    SamplingParams(**asked)  # mistakes are told before anything is loaded
    args = EngineArgs.from_options(arguments.model, dtype=arguments.dtype, max_model_len=arguments.max_model_len)
    llm = AsyncLLM(args, executor_class=executor_class_for(args.model))
    try:
        await _load(llm, talk=not arguments.quiet and sys.stderr.isatty())
        params = await llm.get_default_sampling_params()
        for name, value in {**asked, "output_kind": RequestOutputKind.DELTA}.items():
            setattr(params, name, value)
        if arguments.raw:
            outputs = llm.generate(prompt, params)
        else:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            outputs = llm.chat([*system, {"role": "user", "content": prompt}], params)
        async with contextlib.aclosing(outputs):
            reason = await _write(outputs)
    finally:
        llm.shutdown()
    if reason == "length" and not arguments.quiet:
        print(f"[stopped at {arguments.max_tokens} tokens or the context's end: --max-tokens]", file=sys.stderr)
    return 0


async def _load(llm: "AsyncLLM", *, talk: bool) -> None:
    """Wait for the engine; its stages go to a line of the terminal that is wiped at the end."""
    if talk:
        llm.add_progress_callback(
            lambda progress: print(f"{WIPE}{stage_line(progress)}", end="", file=sys.stderr, flush=True)
        )
    try:
        await llm.ready()
    finally:
        if talk:
            print(WIPE, end="", file=sys.stderr, flush=True)


async def _write(outputs: "AsyncIterator[RequestOutput]") -> str | None:
    """Write the text as it comes; a terminal gets no control characters. The finish reason."""
    to_terminal, reason, last = sys.stdout.isatty(), None, ""
    async for output in outputs:
        for answer in output.outputs:
            last, reason = answer.text or last, answer.finish_reason
            print(clean_text(answer.text) if to_terminal else answer.text, end="", flush=True)
            if reason == "error":
                raise RequestFailedError(f"The request failed in the engine: {answer.stop_reason or 'no reason given'}")
    if not last.endswith("\n"):
        print(flush=True)
    return reason


def _fail(error: LLMKernelError, code: int) -> int:
    print(f"llmkernel: {clean_text(str(error))}", file=sys.stderr)
    return code
