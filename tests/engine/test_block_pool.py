import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmkernel.engine.kv_cache.block import KVCacheBlock
from llmkernel.engine.kv_cache.block_pool import BlockPool


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.get_new_blocks(1)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_usable_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(num_blocks)


def test_unhashed_blocks_are_reused_first_hashed_ones_last() -> None:
    pool = BlockPool(7)
    blocks = pool.get_new_blocks(4)  # 5 and 6 stay free
    pool.cache(blocks[0], b"a")
    pool.cache(blocks[1], b"b")
    pool.free(blocks[::-1])
    assert ids(pool.free_queue) == [4, 3, 5, 6, 2, 1]


def test_what_is_cached_stays_found_until_it_is_reused() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache(blocks[0], b"a")
    pool.free(blocks[::-1])
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is None
    assert blocks[0].block_hash is None


def test_touching_takes_a_block_out_of_the_free_queue() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"a")
    pool.free([block])
    pool.touch([block])
    pool.touch([block])
    assert block.ref_cnt == 2 and ids(pool.free_queue) == [2, 3]
    pool.free([block])
    assert ids(pool.free_queue) == [2, 3]
    pool.free([block])
    assert ids(pool.free_queue) == [2, 3, 1]


def test_duplicates_are_kept_and_each_can_go() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cache(block, b"same")
    assert pool.num_cached_hashes == 1
    found = []
    for _ in range(3):
        hit = pool.get_cached_block(b"same")
        assert hit is not None
        found.append(hit.block_id)
        pool.free([hit])
        pool.get_new_blocks(1)  # reuses it
    assert sorted(found) == [1, 2, 3]
    assert pool.get_cached_block(b"same") is None


def test_freeing_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.free([block])
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.free([block])


def test_reset_waits_until_nobody_holds_anything() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"a")
    assert not pool.reset_cache()
    assert pool.get_cached_block(b"a") is block
    pool.free([block])
    assert pool.reset_cache()
    assert pool.get_cached_block(b"a") is None and block.block_hash is None


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: the free list in order, the holders, the cached names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.free = list(range(1, 9))
        self.names: dict[int, bytes] = {}
        self.held: list[list[KVCacheBlock]] = []

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(ValueError, match="free"):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        assert ids(blocks) == self.free[:count], "the least recently used go first"
        for block_id in self.free[:count]:
            self.names.pop(block_id, None)
        self.free = self.free[count:]
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def name(self, data: st.DataObject, name: bytes) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        block = data.draw(st.sampled_from(blocks))
        self.pool.cache(block, name)
        self.names.setdefault(block.block_id, name)

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, name: bytes) -> None:
        block = self.pool.get_cached_block(name)
        if block is None:
            assert name not in self.names.values()
            return
        assert self.names[block.block_id] == name
        self.pool.touch([block])
        if block.block_id in self.free:
            self.free.remove(block.block_id)
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[::-1]
        self.pool.free(blocks)
        still = {block.block_id for others in self.held for block in others}
        gone = [block.block_id for block in blocks if block.block_id not in still]
        self.free = [i for i in gone if i not in self.names] + self.free + [i for i in gone if i in self.names]

    @rule()
    def reset(self) -> None:
        if self.pool.reset_cache():
            assert not any(self.held)
            self.names.clear()
        else:
            assert any(self.held)

    @invariant()
    def agrees(self) -> None:
        assert ids(self.pool.free_queue) == self.free
        assert self.pool.num_free_blocks + self.pool.num_used_blocks == 8
        assert {block.block_id: block.block_hash for block in self.pool.blocks if block.block_hash} == self.names
        assert self.pool.num_cached_hashes == len(set(self.names.values()))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
