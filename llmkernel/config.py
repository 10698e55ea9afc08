"""EngineArgs: everything that can be said about an engine, checked at the door."""

import difflib
import os
import re
from typing import Any, Literal

import msgspec

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.speculative_config import SpeculativeConfig

__all__ = ["DEFAULT_MODEL", "EngineArgs", "format_bytes", "format_seconds", "parse_bytes", "parse_seconds"]

DEFAULT_MODEL = "smollm2"

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", re.IGNORECASE)
LONGEST_LEASE = 7 * 86400
"""Seconds. A lease is for the time between two kernels; an engine that should stay for good has an owner."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes meant by `text`: 4096, "1GiB", "512 MB", "1.5GiB". InvalidRequestError for anything else."""
    if isinstance(text, int):
        return text
    found = _SIZE.fullmatch(text)
    if not found:
        raise InvalidRequestError(f"{text!r} is not a size; write bytes or a unit, for example '1GiB'.", value=text)
    number, unit = found.groups()
    return int(float(number) * (_BINARY | _UNITS)[unit.upper()])


def format_bytes(count: float) -> str:
    """`count` bytes for people: 935.0 MiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_seconds(text: str | float) -> float:
    """Seconds meant by `text`: 90, "90s", "10m", "1.5h", "1d". InvalidRequestError for anything else."""
    if isinstance(text, int | float):
        return float(text)
    found = _TIME.fullmatch(text)
    if not found:
        raise InvalidRequestError(f"{text!r} is not a time; write seconds or a unit, for example '10m'.", value=text)
    number, unit = found.groups()
    return float(number) * _SECONDS[unit.lower()]


def format_seconds(seconds: float) -> str:
    """`seconds` in the largest unit that leaves no rest: 10m, 90s, 1h."""
    unit = next((unit for unit in "dhm" if seconds and seconds % _SECONDS[unit] == 0), "s")
    return f"{seconds / _SECONDS[unit]:g}{unit}"


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the engine is asked to be. Names are vLLM's where vLLM has them. Frozen; travels in the INIT message.

    model: a short name ("smollm2"), a Hub id, a folder, or a .gguf file.
    max_model_len: tokens of prompt and output together; None = what the model's configuration says.
    block_size: tokens per KV block; None = what suits the device (16 to 64).
    kv_cache_memory: "auto" | bytes | "1GiB": memory of the KV pool.
    max_num_seqs: most requests that run in one step. max_num_batched_tokens: tokens computed in one step.
    num_threads: "auto" | int: torch threads of the engine.
    stream_interval: emit after this many tokens of a request. 1: every token, but those that come faster than a screen
    shows them come together, unless the request names a stream_interval.
    seed: default seed of requests that name none; None = a fresh one for every request.
    implementation: "auto" is the fused decoder where it is built for the model, transformers' own class otherwise.
    enforce_eager: the fused decoder without compiled kernels, by torch's operations alone.
    import_paths: custom logits processors ("module:Class", in order) and the folders to find them in (absolute paths).
    logprobs_mode: logprobs or logits, of the model's own logits (raw) or of what is drawn from (processed).
    speculative: None | "ngram" | the settings of SpeculativeConfig: draft tokens by prompt lookup.
    keep_alive: seconds, "90s", "10m": how long the engine of a notebook waits for its kernel to come back when that is
    restarted or has died. For %llm load in a Jupyter kernel only: elsewhere nobody would find the engine again.
    data_parallel_size: exists for later and is refused by name if set.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_memory: str | int = "auto"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    seed: int | None = None
    num_threads: str | int = "auto"
    stream_interval: int = 1
    keep_alive: str | int | float | None = None
    speculative: str | dict[str, Any] | None = None
    data_parallel_size: int = 1
    trust_remote_code: bool = False
    import_paths: tuple[str, ...] = ()
    log_stats: bool = True
    implementation: Literal["auto", "fused", "transformers"] = "auto"
    enforce_eager: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "stream_interval"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("max_model_len", "block_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1, or None")
        _require(bool(self.model.strip()), "model", self.model, "must not be empty")
        if self.kv_cache_memory != "auto":
            _require(parse_bytes(self.kv_cache_memory) > 0, "kv_cache_memory", self.kv_cache_memory, "must be positive")
        if self.num_threads != "auto":
            good = isinstance(self.num_threads, int) and self.num_threads >= 1
            _require(good, "num_threads", self.num_threads, "must be 'auto' or an integer of at least 1")
        if self.keep_alive is not None:
            good = 0 < self._lease_seconds() <= LONGEST_LEASE
            longest = format_seconds(LONGEST_LEASE)
            _require(good, "keep_alive", self.keep_alive, f"must be more than 0 and at most {longest}, or left out")
        for path in self.import_paths:
            good = isinstance(path, str) and (os.path.isabs(path) or _IMPORT_PATH.fullmatch(path) is not None)
            _require(good, "import_paths", path, "must be 'module:Class', or the absolute path of a folder")
        if self.speculative is not None:
            SpeculativeConfig.parse(self.speculative)
        unbuilt = {
            "data_parallel_size": self.data_parallel_size != 1,
        }
        for name, asked in unbuilt.items():
            if asked:
                raise UnsupportedFeatureError(f"{name} is not built yet; leave it out.", parameter=name)

    @property
    def lease(self) -> float | None:
        """Seconds of keep_alive; None without."""
        return None if self.keep_alive is None else self._lease_seconds()

    def _lease_seconds(self) -> float:
        assert self.keep_alive is not None
        try:
            return parse_seconds(self.keep_alive)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"keep_alive = {error}", parameter="keep_alive", value=self.keep_alive) from None

    @classmethod
    def from_options(cls, model: str = DEFAULT_MODEL, **options: Any) -> "EngineArgs":
        """EngineArgs from loose options: an unknown name is refused with the nearest known one, types are checked."""
        for name in options:
            if name not in cls.__struct_fields__:
                near = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(cls.__struct_fields__)}."
                raise InvalidRequestError(f"Unknown engine option {name!r}{hint}", parameter=name)
        try:
            return msgspec.convert({"model": model, **options}, cls)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"Engine option: {error}") from error


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise InvalidRequestError(f"{name} = {value!r} {rule}.", parameter=name, value=value)
