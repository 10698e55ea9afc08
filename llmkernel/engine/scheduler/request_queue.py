"""Waiting queues: who is admitted next, and who is preempted first (engine.md C.5)."""

import abc
import heapq
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from llmkernel.engine.request import Request

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "RequestQueue", "create_request_queue"]


class RequestQueue(abc.ABC):
    """Requests that wait, in the order of their policy."""

    @abc.abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abc.abstractmethod
    def requeue(self, requests: Sequence[Request]) -> None:
        """Requests that were taken out come back, in the order in which they were taken."""

    @abc.abstractmethod
    def peek(self) -> Request:
        """The request that is next. IndexError if none waits."""

    @abc.abstractmethod
    def pop(self) -> Request:
        """The request that is next, taken out. IndexError if none waits."""

    @abc.abstractmethod
    def remove(self, requests: Collection[Request]) -> None:
        """Take out those of `requests` that wait here."""

    @abc.abstractmethod
    def select_victim(self, running: Sequence[Request]) -> Request:
        """Which of `running`, given in the order of their admission, loses its blocks when there are too few."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In order."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served. A preempted request goes to the front; the victim is who was admitted last."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def requeue(self, requests: Sequence[Request]) -> None:
        self._queue.extendleft(reversed(requests))

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, requests: Collection[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._queue = deque(request for request in self._queue if request.request_id not in gone)

    def select_victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityRequestQueue(RequestQueue):
    """By (priority, arrival_time, request_id), lower first; the victim is the highest of these."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.sort_key, request))

    def requeue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._heap = [item for item in self._heap if item[1].request_id not in gone]
        heapq.heapify(self._heap)

    def select_victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda request: request.sort_key)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda item: item[0]))


def create_request_queue(policy: str) -> RequestQueue:
    """The queue of EngineArgs.scheduling_policy."""
    queues: dict[str, type[RequestQueue]] = {"fcfs": FCFSRequestQueue, "priority": PriorityRequestQueue}
    return queues[policy]()
