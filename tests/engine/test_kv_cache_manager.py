import pytest

from llmkernel.engine.kv_cache.manager import NO_PREFIX, KVCacheManager
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.protocol.sampling_params import SamplingParams

PROMPT = list(range(10))  # two full blocks of 4, and 2 tokens


def make(num_blocks: int = 9, *, enable_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, enable_caching=enable_caching)


def request(manager: KVCacheManager, name: str, prompt: list[int], **params) -> Request:
    salt = params.pop("salt", None)
    return Request(name, prompt, SamplingParams(**params), cache_salt=salt, hash_new_blocks=manager.hash_new_blocks)


def run(manager: KVCacheManager, item: Request, num_tokens: int | None = None) -> None:
    """Adopt, allocate, compute and commit, as a step would."""
    manager.begin_step()
    if item.request_id not in manager.held_blocks():
        manager.adopt_prefix(item, manager.find_prefix(item))
    count = item.num_tokens - item.num_computed_tokens if num_tokens is None else num_tokens
    assert manager.allocate_slots(item, count) is not None
    item.num_computed_tokens += count
    manager.commit(item)


@pytest.mark.row("A-016")
def test_blocks_come_as_tokens_need_them() -> None:
    manager = make()
    item = request(manager, "a", PROMPT)
    manager.adopt_prefix(item, NO_PREFIX)
    assert manager.allocate_slots(item, 3) == [1]
    item.num_computed_tokens = 3
    assert manager.allocate_slots(item, 1) == []
    assert manager.allocate_slots(item, 6) == [2, 3]
    assert manager.block_ids(item) == [1, 2, 3]
    manager.free(item)
    assert manager.pool.num_used_blocks == 0 and manager.held_blocks() == {}


def test_too_few_blocks_change_nothing() -> None:
    manager = make(3)
    item = request(manager, "a", PROMPT)
    manager.adopt_prefix(item, NO_PREFIX)
    assert manager.allocate_slots(item, 10) is None
    assert manager.pool.num_free_blocks == 2 and manager.block_ids(item) == []


@pytest.mark.row("A-112")
def test_a_second_request_finds_the_full_blocks() -> None:
    manager = make()
    run(manager, request(manager, "a", PROMPT))
    prefix = manager.find_prefix(request(manager, "b", [*PROMPT, 77, 78]))
    assert [block.block_id for block in prefix.blocks] == [1, 2]
    assert prefix.num_tokens == 8 and not prefix.being_computed


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_a_hit_leaves_one_token_to_compute(length: int, hit: int) -> None:
    manager = make()
    run(manager, request(manager, "a", PROMPT))
    assert manager.find_prefix(request(manager, "b", PROMPT[:length])).num_tokens == hit


def test_a_hit_ends_at_the_first_miss() -> None:
    manager = make()
    run(manager, request(manager, "a", PROMPT))
    changed = request(manager, "b", [*PROMPT[:3], 99, *PROMPT[4:]])
    assert manager.find_prefix(changed).num_tokens == 0


def test_what_was_scheduled_is_found_only_once_it_is_computed() -> None:
    manager = make()
    first, second = request(manager, "a", PROMPT), request(manager, "b", PROMPT)
    manager.begin_step()
    manager.adopt_prefix(first, NO_PREFIX)
    manager.allocate_slots(first, 10)
    assert manager.find_prefix(second) == ([], 0, True)
    manager.begin_step()  # that step failed: nothing was committed
    assert manager.find_prefix(second) == ([], 0, False)
    first.num_computed_tokens = 6
    manager.commit(first)
    assert manager.find_prefix(second).num_tokens == 4


def test_a_request_waits_for_the_block_after_its_hit_only() -> None:
    manager = make()
    run(manager, request(manager, "a", PROMPT[:4]))
    manager.begin_step()
    longer = request(manager, "b", PROMPT)
    manager.adopt_prefix(longer, manager.find_prefix(longer))
    manager.allocate_slots(longer, 6)
    assert manager.find_prefix(request(manager, "c", PROMPT)).being_computed
    assert not manager.find_prefix(request(manager, "d", [*PROMPT[:4], 5, 5, 5, 5, 5])).being_computed
    assert not manager.find_prefix(request(manager, "e", PROMPT[:8])).being_computed, "it may not use that block"


def test_salts_do_not_share() -> None:
    manager = make()
    run(manager, request(manager, "a", PROMPT, salt="x"))
    assert manager.find_prefix(request(manager, "b", PROMPT, salt="y")).num_tokens == 0
    assert manager.find_prefix(request(manager, "c", PROMPT)).num_tokens == 0
    assert manager.find_prefix(request(manager, "d", PROMPT, salt="x")).num_tokens == 8


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    manager = make()
    first, second = request(manager, "a", PROMPT), request(manager, "b", PROMPT)
    run(manager, first)
    run(manager, second)
    assert manager.block_ids(first)[:2] == manager.block_ids(second)[:2]
    assert manager.pool.num_used_blocks == 4
    manager.free(first)
    assert manager.pool.num_used_blocks == 3
    manager.free(second)
    assert manager.pool.num_used_blocks == 0


def test_the_end_of_a_sequence_is_evicted_before_its_start() -> None:
    manager = make(5)
    item = request(manager, "a", list(range(12)))
    run(manager, item)
    manager.free(item)
    run(manager, request(manager, "other", [50, 51, 52, 53, 54]))  # takes the one free block, then evicts one
    assert manager.find_prefix(request(manager, "b", list(range(13)))).num_tokens == 8


def test_a_hit_in_the_free_queue_counts_as_missing() -> None:
    manager = make(4)
    item = request(manager, "a", PROMPT)
    run(manager, item)
    second = request(manager, "b", PROMPT)
    assert manager.blocks_missing(second, manager.find_prefix(second)) == 1
    manager.free(item)
    assert manager.blocks_missing(second, manager.find_prefix(second)) == 3
    assert manager.pool.num_free_blocks == 3
    run(manager, second)
    assert manager.pool.num_free_blocks == 0


def test_output_tokens_are_cached_too() -> None:
    manager = make()
    item = request(manager, "a", PROMPT)
    run(manager, item)
    for token_id in (50, 51, 52):
        item.append_output_token(token_id)
        run(manager, item, 1)
    manager.free(item)
    assert manager.find_prefix(request(manager, "b", [*PROMPT, 50, 51, 52])).num_tokens == 12
    assert manager.find_prefix(request(manager, "c", [*PROMPT, 50, 99, 52])).num_tokens == 8


@pytest.mark.parametrize("switch", ["engine", "request"])
def test_prefix_caching_can_be_off(switch: str) -> None:
    manager = make(enable_caching=switch == "request")
    run(manager, request(manager, "a", PROMPT))
    second = request(manager, "b", PROMPT, skip_reading_prefix_cache=switch == "request")
    assert manager.find_prefix(second) == NO_PREFIX
    run(manager, second)
    assert manager.pool.num_used_blocks == 6
    assert manager.take_stats().queries == (10 if switch == "request" else 0)


def test_look_ups_are_counted_and_told_once() -> None:
    manager = make(20)
    run(manager, request(manager, "a", PROMPT))
    again = request(manager, "b", PROMPT)
    again.status = RequestStatus.PREEMPTED
    run(manager, again)
    run(manager, request(manager, "c", PROMPT))
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert manager.take_stats().requests == 0
    assert manager.total_stats.requests == 2


def test_reset_forgets_prefixes_when_nobody_holds_blocks() -> None:
    manager = make()
    item = request(manager, "a", PROMPT)
    run(manager, item)
    assert not manager.reset_prefix_cache()
    assert not manager.take_stats().reset
    manager.free(item)
    assert manager.reset_prefix_cache()
    assert manager.take_stats().reset
    assert manager.find_prefix(request(manager, "b", PROMPT)).num_tokens == 0
