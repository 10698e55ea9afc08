"""The demo of rows A-029 and A-163: an engine thread, three client threads, and no sleep anywhere.

Every client submits all its queries before it reads an answer; the engine answers by identity. Ready means that the
engine's socket is bound, and the end is a message, so nobody waits longer than there is something to wait for.

    python -m tests.protocol.client_server_demo            three clients, three queries each
    python -m tests.protocol.client_server_demo --endless  until Ctrl-C, or until whoever started it is gone
"""

import concurrent.futures
import os
import sys
import threading
import time
import uuid

import zmq

ADDRESS, STOP_ADDRESS = "inproc://engine", "inproc://stop"
LOOK_AROUND = 1.0
"""Seconds after which an endless demo sees that whoever started it is gone."""


def process_inference(query: str) -> str:
    """Where a model would be."""
    return query.upper()


def engine(ctx: zmq.Context, ready: threading.Event) -> None:
    """Answer queries until somebody sends a word on the stop socket."""
    with ctx.socket(zmq.ROUTER) as router, ctx.socket(zmq.PAIR) as stop:
        router.bind(ADDRESS)
        stop.bind(STOP_ADDRESS)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        ready.set()
        while True:
            for socket, _ in poller.poll():
                if socket is stop:
                    return
                identity, payload = router.recv_multipart()
                message = zmq.utils.jsonapi.loads(payload)
                answer = {"msg_id": message["msg_id"], "text": process_inference(message["query"])}
                router.send_multipart([identity, zmq.utils.jsonapi.dumps(answer)])


def client(ctx: zmq.Context, number: int, enough: threading.Event, answers: dict[str, str]) -> None:
    """Submit three queries, then collect their answers by msg_id; again and again until `enough`."""
    with ctx.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, b"client-%d" % number)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(ADDRESS)
        while True:
            waiting = {}
            for index in range(3):
                query = f"question {index} of client {number}"
                msg_id = str(uuid.uuid4())
                waiting[msg_id] = query
                dealer.send_json({"msg_id": msg_id, "query": query, "timestamp": time.time()})
            while waiting:
                answer = dealer.recv_json()
                answers[waiting.pop(answer["msg_id"])] = answer["text"]
            if enough.is_set():
                return


def main(endless: bool = False) -> dict[str, str]:
    """Run the demo; the answers by query."""
    answers: dict[str, str] = {}
    ready, enough = threading.Event(), threading.Event()
    with zmq.Context() as ctx, concurrent.futures.ThreadPoolExecutor() as threads:
        threads.submit(engine, ctx, ready)
        ready.wait()
        if not endless:
            enough.set()
        clients = [threads.submit(client, ctx, number, enough, answers) for number in range(3)]
        try:
            print("The clients ask.", flush=True)
            starter = os.getppid()
            while concurrent.futures.wait(clients, LOOK_AROUND).not_done and os.getppid() == starter:
                pass
        except KeyboardInterrupt:
            print("\nInterrupted: the demo ends.")
        finally:
            enough.set()
            for finished in clients:
                finished.result()
            with ctx.socket(zmq.PAIR) as stop:
                stop.connect(STOP_ADDRESS)
                stop.send(b"")
    return answers


if __name__ == "__main__":
    for asked, told in sorted(main("--endless" in sys.argv).items()):
        print(f"{asked} -> {told}")
