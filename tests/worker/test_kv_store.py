"""PagedKVStore: what is written is what is gathered, and memory is committed when it is touched."""

import torch

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.kv_store import PagedKVStore
from llmkernel.engine.worker.memory import resident_memory

CPU = torch.device("cpu")


def layer(index: int, kv_heads: int = 2, key_size: int = 4, value_size: int = 4) -> LayerSpec:
    return LayerSpec(index, 4, kv_heads, key_size, value_size, 1.0)


def test_rows_come_back_by_layer_and_block() -> None:
    layers = [layer(0), layer(1, value_size=6), layer(2), layer(3, kv_heads=1, key_size=10, value_size=10)]
    store = PagedKVStore(layers, num_blocks=7, block_size=3, dtype=torch.float32, device=CPU)
    written = {}
    for spec in layers:
        for block in (5, 1, 4):
            rows = torch.randn(3, spec.row_size)
            written[spec.index, block] = rows
            store.write(spec.index, store.slots(torch.tensor([block] * 3), torch.arange(3)), rows)
    for spec in layers:
        keys, values = store.gather(spec.index, store.places(torch.tensor([[4, 5], [1, 0]])))
        assert keys.shape == (2, spec.num_kv_heads, 6, spec.key_size)
        assert values.shape == (2, spec.num_kv_heads, 6, spec.value_size)
        rows = torch.cat((keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)), -1)
        blocks = [written[spec.index, block] for block in (4, 5, 1)] + [torch.zeros(3, spec.row_size)]
        torch.testing.assert_close(rows, torch.cat(blocks).view(2, 6, -1))


def test_a_copy_is_what_is_gathered_and_stays() -> None:
    spec = layer(0)
    store = PagedKVStore([spec], num_blocks=5, block_size=3, dtype=torch.float32, device=CPU)
    rows = torch.randn(6, spec.row_size)
    store.write(0, store.slots(torch.tensor([3, 3, 3, 1, 1, 1]), torch.arange(3).repeat(2)), rows)
    places = store.places(torch.tensor([[1, 0], [3, 1]]))
    keys, values = store.gather(0, places)
    copied = store.copy(0, places)
    torch.testing.assert_close(copied, torch.stack((keys, values)))
    before = copied.clone()
    store.clear_blocks([1, 3])
    torch.testing.assert_close(copied, before)


def test_cleared_blocks_are_zero_in_every_layer_and_others_stay() -> None:
    layers = [layer(0), layer(1, value_size=6)]
    store = PagedKVStore(layers, num_blocks=4, block_size=2, dtype=torch.bfloat16, device=CPU)
    for spec in layers:
        rows = torch.full((4, spec.row_size), torch.nan, dtype=torch.bfloat16)
        store.write(spec.index, store.slots(torch.tensor([1, 1, 2, 2]), torch.tensor([0, 1, 0, 1])), rows)
    store.clear_blocks([1])
    for spec in layers:
        keys, values = store.gather(spec.index, store.places(torch.tensor([[1]])))
        assert not keys.any()
        assert not values.any()
        assert store.gather(spec.index, store.places(torch.tensor([[2]])))[0].isnan().all()


def test_memory_is_committed_when_it_is_used() -> None:
    layers = [layer(index, key_size=64, value_size=64) for index in range(4)]
    before = resident_memory()
    store = PagedKVStore(layers, num_blocks=16384, block_size=32, dtype=torch.float32, device=CPU)
    assert store.num_bytes == 16384 * 32 * 4 * 2 * 128 * 4
    assert resident_memory() - before < store.num_bytes / 20
    for spec in layers:
        slots = store.slots(torch.arange(1, 33), torch.zeros(32, dtype=torch.int64))
        store.write(spec.index, slots, torch.ones(32, spec.row_size))
    used = 33 * store.num_bytes // store.num_blocks
    assert resident_memory() - before < 4 * used + store.num_bytes / 20
