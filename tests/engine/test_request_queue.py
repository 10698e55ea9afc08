import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.request_queue import create_request_queue
from llmkernel.protocol.sampling_params import SamplingParams


def request(name: str, priority: int = 0, arrival_time: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(), priority=priority, arrival_time=arrival_time)


def drain(queue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_is_the_order_of_arrival() -> None:
    queue = create_request_queue("fcfs")
    for name, priority in (("a", 5), ("b", 1), ("c", 3)):
        queue.add(request(name, priority))
    assert queue.peek().request_id == "a"
    assert [item.request_id for item in queue] == ["a", "b", "c"]
    assert drain(queue) == ["a", "b", "c"]


def test_fcfs_puts_back_in_front_in_order() -> None:
    queue = create_request_queue("fcfs")
    queue.add(request("c"))
    queue.requeue([request("a"), request("b")])
    assert drain(queue) == ["a", "b", "c"]


@pytest.mark.row("A-070")
@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([("a", 2, 0), ("b", 1, 9)], "ba"),
        ([("a", 1, 9), ("b", 1, 3)], "ba"),
        ([("b", 1, 3), ("a", 1, 3)], "ab"),
        ([("a", 0, 0), ("b", -1, 5)], "ba"),
    ],
    ids=["priority", "arrival", "id", "negative"],
)
def test_priority_order(requests: list[tuple[str, int, float]], expected: str) -> None:
    queue = create_request_queue("priority")
    for item in requests:
        queue.add(request(*item))
    assert "".join(item.request_id for item in queue) == expected
    assert "".join(drain(queue)) == expected


def test_priority_puts_back_by_key_not_in_front() -> None:
    queue = create_request_queue("priority")
    queue.add(request("a", 1))
    queue.requeue([request("b", 2)])
    assert drain(queue) == ["a", "b"]


def test_victims() -> None:
    running = [request("a", 1, 5), request("b", 3, 1), request("c", 3, 4), request("d", 2, 9)]
    assert create_request_queue("fcfs").select_victim(running).request_id == "d"
    assert create_request_queue("priority").select_victim(running).request_id == "c"
    assert create_request_queue("priority").select_victim(running[:2]).request_id == "b"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(keys=st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=12), gone=st.sets(st.integers(0, 11)))
def test_removing_keeps_the_order_of_the_rest(policy: str, keys: list[tuple[int, int]], gone: set[int]) -> None:
    queue = create_request_queue(policy)
    requests = [request(f"{index:02}", priority, arrival) for index, (priority, arrival) in enumerate(keys)]
    for item in requests:
        queue.add(item)
    before = [item.request_id for item in queue]
    dropped = [requests[index] for index in gone if index < len(requests)]
    queue.remove(dropped)
    names = {item.request_id for item in dropped}
    assert drain(queue) == [name for name in before if name not in names]
