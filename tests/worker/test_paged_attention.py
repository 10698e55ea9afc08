"""PagedAttention against attention written out: mixed chunks and decodes, windows, soft caps, sinks, head sizes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.engine.worker import paged_attention
from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.dense_rows import DenseRows
from llmkernel.engine.worker.kv_store import PagedKVStore
from llmkernel.engine.worker.paged_attention import PagedAttention
from llmkernel.engine.worker.scheduled_tokens import ScheduledTokens, attention_order

BLOCK = 4
CPU = torch.device("cpu")


@dataclasses.dataclass
class Sequence:
    """A request of the model under test: its blocks, and every key, value and query that it ever had."""

    block_ids: np.ndarray
    computed: int = 0
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def take_back(self, count: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.computed -= count
        self.keys, self.values = self.keys[:, : self.computed], self.values[:, : self.computed]


def expected(query: torch.Tensor, sequence: Sequence, layer: LayerSpec, sinks: torch.Tensor | None) -> torch.Tensor:
    """[T, H, Dv] for the last T tokens of the sequence, one head and one token at a time in float64."""
    assert sequence.keys is not None
    assert sequence.values is not None
    tokens, length = query.shape[1], sequence.keys.shape[1]
    out = torch.empty(tokens, layer.num_heads, layer.value_size, dtype=torch.float64)
    group = layer.num_heads // layer.num_kv_heads
    for t in range(tokens):
        position = length - tokens + t
        first = 0 if layer.window is None else max(0, position + 1 - layer.window)
        for head in range(layer.num_heads):
            keys = sequence.keys[head // group, first : position + 1].double()
            scores = keys @ query[head, t].double() * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = torch.softmax(scores, 0)[: len(keys)]
            out[t, head] = weights @ sequence.values[head // group, first : position + 1].double()
    return out


def run_steps(
    layers: list[LayerSpec],
    steps: list[dict[int, int]],
    dtype: torch.dtype = torch.float32,
    dense_bytes: int = 0,
    rejected: int = 0,
) -> float:
    """Run steps {sequence: tokens} through every layer; the largest difference from `expected`.

    rejected: so many of the tokens behind the first of a step are taken back after it, where there was a text before.
    """
    generator = torch.Generator().manual_seed(0)
    modules = [torch.nn.Identity() for _ in layers]
    table = dict(zip(modules, layers, strict=True))
    count = 1 + max(index for step in steps for index in step)
    length = max(sum(step.get(index, 0) for step in steps) for index in range(count))
    blocks = -(-length // BLOCK)
    store = PagedKVStore(layers, num_blocks=1 + count * blocks, block_size=BLOCK, dtype=dtype, device=CPU)
    dense = DenseRows(store, dtype, CPU, dense_bytes)
    order = torch.randperm(count * blocks, generator=generator).numpy() + 1
    states = [[Sequence(order[index * blocks : (index + 1) * blocks]) for index in range(count)] for _ in layers]
    sinks = [torch.randn(layer.num_heads, generator=generator) if layer.has_sinks else None for layer in layers]
    worst = 0.0
    for step in steps:
        asked = [
            ScheduledTokens(n, states[0][index].computed, states[0][index].block_ids, owner=("request", index))
            for index, n in step.items()
        ]
        places = attention_order(asked)
        scheduled = [asked[place] for place in places]
        parts = [list(step.items())[place] for place in places]
        context = PagedAttention(store, table, scheduled, dtype=dtype, device=CPU, dense=dense)
        total = sum(n for _, n in parts)
        for module, layer, sequences, sink in zip(modules, layers, states, sinks, strict=True):
            query, key, value = (
                torch.randn(heads, total, size, generator=generator).to(dtype)
                for heads, size in (
                    (layer.num_heads, layer.key_size),
                    (layer.num_kv_heads, layer.key_size),
                    (layer.num_kv_heads, layer.value_size),
                )
            )
            got = context.attend(module, query[None], key[None], value[None], {"s_aux": sink})
            start = 0
            for index, n in parts:
                sequence, here = sequences[index], slice(start, start + n)
                sequence.keys = _append(sequence.keys, key[:, here])
                sequence.values = _append(sequence.values, value[:, here])
                sequence.computed += n
                want = expected(query[:, here], sequence, layer, sink)
                worst = max(worst, float((got[here].double() - want).abs().max()))
                start += n
                if sequence.computed > n:
                    sequence.take_back(min(rejected, n - 1))
        assert context.num_calls == len(layers)
        dense.end_step(scheduled)
        assert dense.num_bytes <= dense_bytes
    return worst


def _append(before: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if before is None else torch.cat((before, new), 1)


PLAIN = LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_size=8, value_size=8, scaling=0.35)
KINDS = {
    "grouped": PLAIN,
    "one key head": dataclasses.replace(PLAIN, num_kv_heads=1),
    "as many key heads": dataclasses.replace(PLAIN, num_kv_heads=4),
    "window": dataclasses.replace(PLAIN, window=6),
    "window of one": dataclasses.replace(PLAIN, window=1),
    "softcap": dataclasses.replace(PLAIN, softcap=2.0),
    "softcap in a window": dataclasses.replace(PLAIN, softcap=2.0, window=5),
    "sinks": dataclasses.replace(PLAIN, has_sinks=True),
    "sinks in a window": dataclasses.replace(PLAIN, has_sinks=True, window=7),
    "values of another size": dataclasses.replace(PLAIN, value_size=6),
}
LAYERS = [dataclasses.replace(layer, index=index) for index, layer in enumerate(KINDS.values())]
"""All of them at once, as one model: rows of three sizes, four windows."""

steps_of_any_kind = st.lists(
    st.dictionaries(st.integers(0, 4), st.one_of(st.just(1), st.integers(1, 13)), min_size=1), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(steps=steps_of_any_kind, budget=st.sampled_from([0, 3, 512]))
def test_any_mix_of_chunks_and_decodes(steps: list[dict[int, int]], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "PADDING_BUDGET", budget)  # 0: every length is a group of its own
        assert run_steps(LAYERS, steps) < 1e-5


SAME_SIZES = [dataclasses.replace(layer, index=index) for index, layer in enumerate(LAYERS) if layer.value_size == 8]
lasting_steps = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 3), st.sampled_from([1, 1, 1, 5]), min_size=1), st.integers(1, 7)),
    min_size=1,
    max_size=4,
).map(lambda runs: [step for step, times in runs for _ in range(times)])
"""Steps that repeat: decodes in one group for a while, then another mix."""


@settings(max_examples=40, deadline=None)
@given(
    steps=lasting_steps,
    budget=st.sampled_from([0, 3, 512]),
    dense_bytes=st.sampled_from([20000, 2**30]),
    rejected=st.sampled_from([0, 2, 4]),
)
def test_decodes_that_last_keep_what_they_gathered(
    steps: list[dict[int, int]], budget: int, dense_bytes: int, rejected: int
) -> None:
    """Groups that grow beyond their room, change, come back, and such as do not fit into what may be kept; drafts that
    are accepted in part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "PADDING_BUDGET", budget)
        assert run_steps(SAME_SIZES, steps, dense_bytes=dense_bytes, rejected=rejected) < 1e-5


@pytest.mark.parametrize("lengths", [[3], [130], [1, 6, 11, 16, 21, 200]], ids=["short", "long", "ragged"])
def test_kept_rows_in_bfloat16(lengths: list[int]) -> None:
    """In float32 while they are few, in bfloat16 beyond."""
    every_one = dict.fromkeys(range(len(lengths)), 1)
    steps = [dict(enumerate(lengths)), *[every_one] * 12]
    assert run_steps([PLAIN], steps, torch.bfloat16, dense_bytes=2**30) < 0.05


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_prompt_in_pieces_beside_decodes_keeps_what_it_sees(dtype: torch.dtype, tolerance: float) -> None:
    """More pieces than it first has room for, the last ones shorter, then the prompt decodes."""
    steps = [{0: 40, 1: 3}, *[{0: 20, 1: 1}] * 12, {0: 17, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    assert run_steps(SAME_SIZES, steps, dtype, dense_bytes=2**30) < tolerance


def test_what_is_kept_is_dropped_with_its_group() -> None:
    store = PagedKVStore([PLAIN], num_blocks=9, block_size=BLOCK, dtype=torch.float32, device=CPU)
    dense = DenseRows(store, torch.float32, CPU, 2**30)
    blocks = {owner: np.array([1 + 4 * owner, 2 + 4 * owner]) for owner in (0, 1)}
    sizes = []
    for computed, owners in [(1, (0, 1)), (2, (0, 1)), (3, (0, 1)), (4, (0,)), (5, (0,)), (6, ())]:
        scheduled = [ScheduledTokens(1, computed, blocks[owner], owner) for owner in owners]
        if scheduled:
            dense.open(scheduled, [PLAIN])
        dense.end_step(scheduled)
        sizes.append(dense.num_bytes)
    row = PLAIN.row_size * 4
    assert sizes == [0, 24 * row, 24 * row, 0, 16 * row, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_many_ragged_decodes_in_bfloat16(kind: str) -> None:
    """Batched products take over where there is enough to do; bfloat16 rounds to 3 digits."""
    layer = dataclasses.replace(KINDS[kind], index=0)
    lengths = {index: 1 + 5 * index for index in range(14)}
    every_one = dict.fromkeys(lengths, 1)
    assert run_steps([layer], [lengths, every_one, every_one, every_one], torch.bfloat16) < 0.05


@pytest.mark.parametrize("dense_bytes", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_with_their_drafts_attend_together(kind: str, dtype: torch.dtype, dense_bytes: int) -> None:
    """Short chunks of unequal length after texts of unequal length, beside decodes and a prompt."""
    layer = dataclasses.replace(KINDS[kind], index=0)
    lengths = {index: 1 + 9 * index for index in range(8)}
    drafted = {index: 1 + index % 6 for index in range(8)}
    steps = [lengths, drafted, dict.fromkeys(lengths, 4), {**dict.fromkeys(range(7), 2), 7: 20, 8: 30}, drafted]
    steps += [drafted] * 3
    assert run_steps([layer], steps, dtype, dense_bytes, rejected=2) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_long_chunks_in_bfloat16(kind: str) -> None:
    """Chunks longer than a block of queries, from the start and after others, beside decodes."""
    layer = dataclasses.replace(KINDS[kind], index=0)
    steps = [{0: 150, 1: 3}, {1: 140, 0: 1}, {0: 131, 1: 1}, {0: 1, 1: 1}]
    assert run_steps([layer], steps, torch.bfloat16) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_end_is_never_read(kind: str) -> None:
    """Rows of a block that no token of this request has filled may hold anything but NaN; the null block stays zero."""
    layer = dataclasses.replace(KINDS[kind], index=0)
    module = torch.nn.Identity()
    store = PagedKVStore([layer], num_blocks=4, block_size=BLOCK, dtype=torch.float32, device=CPU)
    junk = torch.full((BLOCK, layer.row_size), 1e30)
    for block in (1, 2, 3):
        store.write(0, store.slots(torch.full((BLOCK,), block), torch.arange(BLOCK)), junk)
    store.clear_blocks([1, 3])  # what the runner does with a block that a step begins and does not fill
    sequences = [ScheduledTokens(1, 0, np.array([1])), ScheduledTokens(1, 4, np.array([2, 3]))]
    context = PagedAttention(store, {module: layer}, sequences, dtype=torch.float32, device=CPU)
    query = torch.randn(1, layer.num_heads, 2, layer.key_size)
    key = torch.randn(1, layer.num_kv_heads, 2, layer.key_size)
    value = torch.randn(1, layer.num_kv_heads, 2, layer.value_size)
    sinks = {"s_aux": torch.zeros(layer.num_heads)} if layer.has_sinks else {}
    out = context.attend(module, query, key, value, sinks)[0]
    weight = 1.0 if not layer.has_sinks else None
    group = layer.num_heads // layer.num_kv_heads
    if weight is not None:  # a first token sees itself alone
        torch.testing.assert_close(out, value[0, :, 0].repeat_interleave(group, 0))
    keys, values = store.gather(0, store.places(torch.tensor([[0]])))
    assert not keys.any()
    assert not values.any()
