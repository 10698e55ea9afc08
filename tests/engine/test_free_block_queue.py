import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkernel.engine.kv_cache.block import KVCacheBlock
from llmkernel.engine.kv_cache.free_block_queue import FreeBlockQueue


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def make(count: int) -> tuple[list[KVCacheBlock], FreeBlockQueue]:
    blocks = [KVCacheBlock(index) for index in range(count)]
    return blocks, FreeBlockQueue(blocks)


def test_blocks_come_out_in_order() -> None:
    _, queue = make(5)
    assert [block.block_id for block in queue.pop_front(2)] == [0, 1]
    assert ids(queue) == [2, 3, 4]
    assert queue.pop_front(0) == []
    assert len(queue.pop_front(3)) == 3
    assert ids(queue) == [] and len(queue) == 0


def test_too_many_is_refused_and_changes_nothing() -> None:
    _, queue = make(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        queue.pop_front(3)
    assert ids(queue) == [0, 1]


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    blocks, queue = make(2)
    queue.remove(blocks[0])
    with pytest.raises(ValueError, match="is not free"):
        queue.remove(blocks[0])
    assert ids(queue) == [1]


def test_both_ends_keep_the_order_given() -> None:
    blocks, queue = make(6)
    taken = queue.pop_front(6)
    queue.extend(taken[:2])
    queue.extend_front(taken[2:4])
    queue.extend(taken[4:])
    assert ids(queue) == [2, 3, 0, 1, 4, 5]
    assert blocks[4].prev_free is blocks[1]


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "back", "front"]), st.integers(0, 9)), max_size=60))
def test_it_is_the_list_that_it_seems_to_be(operations: list[tuple[str, int]]) -> None:
    blocks, queue = make(8)
    model = list(range(8))
    for operation, number in operations:
        taken = [index for index in range(8) if index not in model]
        if operation == "pop" and number <= len(model):
            assert [block.block_id for block in queue.pop_front(number)] == model[:number]
            model = model[number:]
        elif operation == "remove" and number in model:
            queue.remove(blocks[number])
            model.remove(number)
        elif operation == "back":
            queue.extend([blocks[index] for index in taken[:number]])
            model += taken[:number]
        elif operation == "front":
            queue.extend_front([blocks[index] for index in taken[:number]])
            model = taken[:number] + model
        assert ids(queue) == model
        assert len(queue) == len(model)
