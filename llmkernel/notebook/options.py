"""The options of our magics: one table that parsing, help and completion read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

__all__ = ["CHAT", "GENERATE", "LOAD", "LOGS", "SETTINGS", "SHOW", "STATUS", "STOP", "TURNS", "UNLOAD", "Option"]


@dataclass(frozen=True)
class Option:
    """One option. flags: as they are typed. name: key in the parsed values. metavar: "" = a switch without a value.

    repeat: may be given several times, the value is a list. setting: `%llm config` knows it too.
    """

    flags: tuple[str, ...]
    name: str
    metavar: str
    help: str
    convert: Callable[[str], Any] = str
    repeat: bool = False
    setting: bool = False

    def value(self, text: str) -> Any:
        """`text` as a value of this option; UsageError in one line."""
        try:
            return self.convert(text)
        except ValueError as error:
            raise UsageError(f"{self.flags[-1]}: {error}") from None

    @property
    def usage(self) -> str:
        return ", ".join(self.flags) + (f" {self.metavar}" if self.metavar else "")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number.") from None


def _variable(text: str) -> str:
    if not text.isidentifier():
        raise ValueError(f"{text!r} is not the name of a variable.")
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}.")
        return text

    return convert


def _threads(text: str) -> int | str:
    return text if text == "auto" else _integer(text)


GENERATE = (
    Option(("-o", "--output"), "output", "NAME", "keep the handle in this variable (`_` has it too)", _variable),
    Option(("--max-tokens",), "max_tokens", "N", "longest answer in tokens (512)", _integer, setting=True),
    Option(("-t", "--temperature"), "temperature", "T", "0 = greedy (the model's own)", _number, setting=True),
    Option(("-n",), "n", "N", "answers per prompt (1)", _integer, setting=True),
    Option(("--seed",), "seed", "N", "same seed, same answer; answer i draws with seed + i", _integer, setting=True),
    Option(("-p", "--top-p"), "top_p", "P", "draw from the likeliest tokens that sum to P", _number, setting=True),
    Option(("-k", "--top-k"), "top_k", "K", "draw from the K likeliest tokens", _integer, setting=True),
    Option(("--min-p",), "min_p", "P", "drop tokens below P times the likeliest", _number, setting=True),
    Option(("--presence-penalty",), "presence_penalty", "X", "-2 to 2: less of any token that came already", _number,
           setting=True),
    Option(("--frequency-penalty",), "frequency_penalty", "X", "-2 to 2: less of a token each time it came", _number,
           setting=True),
    Option(("--repetition-penalty",), "repetition_penalty", "X", "above 1: less of what prompt or answer hold", _number,
           setting=True),
    Option(("--min-tokens",), "min_tokens", "N", "no end before N tokens", _integer, setting=True),
    Option(("--ignore-eos",), "ignore_eos", "", "go on after the end token", setting=True),
    Option(("--raw",), "raw", "", "send the text as it is, without the chat template", setting=True),
    Option(("--system",), "system", "TEXT", "system message", setting=True),
    Option(("--template",), "template", "VAR|FILE", "chat template in place of the model's own"),
    Option(("--stop",), "stop", "S", "end the answer before this text; may be repeated", repeat=True, setting=True),
    Option(("--stop-token-id",), "stop_token_ids", "ID", "end the answer at this token; may be repeated", _integer,
           repeat=True, setting=True),
    Option(("--include-stop",), "include_stop_str_in_output", "", "keep what ended the answer in it", setting=True),
    Option(("--bad-word",), "bad_words", "TEXT", "never generate this; may be repeated", repeat=True, setting=True),
    Option(("--special-tokens",), "special_tokens", "", "show special tokens in the answer", setting=True),
    Option(("--logprobs",), "logprobs", "N", "keep the N likeliest tokens of each position: `.tokens()`", _integer,
           setting=True),
    Option(("--prompt-logprobs",), "prompt_logprobs", "N", "the same for the prompt's tokens", _integer, setting=True),
    Option(("--stream-interval",), "stream_interval", "N", "tokens between two steps of the display", _integer,
           setting=True),
    Option(("--json-schema",), "json_schema", "VAR|FILE", "the answer is JSON of this schema: a dict, JSON text or a"
           " pydantic model"),
    Option(("--json-object",), "json_object", "", "the answer is a JSON object"),
    Option(("--regex",), "regex", "RE", "the answer matches this, from its first character to its last"),
    Option(("--choice",), "choice", "TEXT", "the answer is one of these; to be repeated", repeat=True),
    Option(("--grammar",), "grammar", "VAR|FILE", "the answer is a sentence of this grammar (Lark or GBNF)"),
    Option(("--params",), "params", "VAR", "a SamplingParams or a dict for all else; the options come on top"),
    Option(("--model",), "model", "NAME", "a loaded model (the one loaded last); repeat it to ask several side by side",
           repeat=True, setting=True),
    Option(("--priority",), "priority", "N", "lower runs earlier (scheduling_policy priority)", _integer, setting=True),
    Option(("-b", "--background"), "background", "", "do not wait: the cell ends, the answer grows on"),
    Option(("--quiet",), "quiet", "", "show nothing", setting=True),
    Option(("--plain",), "plain", "", "show and store the answer as plain text", setting=True),
    Option(("-i", "--interpolate"), "interpolate", "", "replace {name} in the body by your variables"),
    Option(("--prompts",), "prompts", "VAR", "one request per item of a list, Series or DataFrame; the body is a"
           " template with {prompt}, or with the item's keys or columns"),
)  # fmt: skip

CHAT = tuple(option for option in GENERATE if option.name not in ("n", "raw", "prompts"))
"""Those of %%chat: one question, one answer, always by a template."""

SETTINGS = {option.name: option for option in GENERATE if option.setting}
"""What `%llm config` can set, by name."""

LOAD = (
    Option(("--name",), "name", "NAME", "call it this in --model (the model's name)"),
    Option(
        ("--dtype",),
        "dtype",
        "TYPE",
        "auto, float32, bfloat16 or float16",
        _one_of("auto", "float32", "bfloat16", "float16"),
    ),
    Option(
        ("--quantization",), "quantization", "KIND", "auto, none, int8 or int4", _one_of("auto", "none", "int8", "int4")
    ),
    Option(("--device",), "device", "DEVICE", "auto, cpu or cuda"),
    Option(("--max-model-len",), "max_model_len", "N", "tokens of prompt and answer together", _integer),
    Option(("--kv-cache",), "kv_cache_memory", "SIZE", "memory for the KV cache, for example 1GiB"),
    Option(("--block-size",), "block_size", "N", "tokens per KV block", _integer),
    Option(("--max-num-seqs",), "max_num_seqs", "N", "most requests in one step", _integer),
    Option(("--max-num-batched-tokens",), "max_num_batched_tokens", "N", "most tokens in one step", _integer),
    Option(("--no-prefix-caching",), "no_prefix_caching", "", "compute every prompt anew"),
    Option(("--scheduling-policy",), "scheduling_policy", "POLICY", "fcfs or priority", _one_of("fcfs", "priority")),
    Option(("--seed",), "seed", "N", "seed of requests that name none", _integer),
    Option(("--num-threads",), "num_threads", "N", "torch threads of the engine, or auto", _threads),
    Option(
        ("--implementation",),
        "implementation",
        "KIND",
        "auto, fused (this package's own decoder) or transformers",
        _one_of("auto", "fused", "transformers"),
    ),
    Option(("--enforce-eager",), "enforce_eager", "", "no compiled kernels: torch's operations alone"),
    Option(
        ("--speculative",),
        "speculative",
        "METHOD",
        "ngram: try what came after the same words before; same text, sooner",
    ),
    Option(("--keep-alive",), "keep_alive", "TIME", "stay so long for a kernel that is restarted or has died, as 10m"),
    Option(("--auto-restart",), "auto_restart", "", "start the engine again by itself when it dies"),
    Option(("--revision",), "revision", "REV", "branch, tag or commit on the Hub"),
    Option(("--tokenizer",), "tokenizer", "NAME", "another tokenizer than the model's own"),
    Option(("--trust-remote-code",), "trust_remote_code", "", "run code that comes with the model"),
)
UNLOAD = (Option(("--all",), "all", "", "every model"),)
STOP = (Option(("--all",), "all", "", "every request that runs"),)
TURNS = (
    Option(("--model",), "model", "NAME", "the chat with this model (the one loaded last)"),
    Option(("-n",), "turns", "N", "turns to take back (1)", _integer),
)
SHOW = (Option(("--view",), "view", "", "as the live view: text, Markdown, tokens, Copy; it is not stored"),)
STATUS = (Option(("-v", "--verbose"), "verbose", "", "the stages of the load too, and how the weights are kept"),)
LOGS = (Option(("-n",), "lines", "N", "last lines (50)", _integer),)
