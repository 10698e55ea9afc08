"""What a step costs beside the model: schedule() and update_from_output(), microseconds. Prints JSON.

    python benchmarks/scheduler.py

Every request decodes, one token a step; the executor is replaced by a dictionary, so that only the scheduler is timed.
"""

import json
import statistics
import time

from llmkernel.engine.kv_cache.manager import KVCacheManager
from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.output import ModelRunnerOutput
from llmkernel.engine.scheduler.scheduler import Scheduler
from llmkernel.protocol.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
STEPS = 300


def measure(num_running: int, *, enable_caching: bool = True) -> dict[str, float]:
    """Median microseconds per step with `num_running` requests: schedule, update, both, and both per request."""
    kv_cache = KVCacheManager(num_running * 64 + 1, BLOCK_SIZE, enable_caching=enable_caching)
    scheduler = Scheduler(
        kv_cache, max_num_seqs=num_running, max_num_batched_tokens=num_running * PROMPT_TOKENS, max_model_len=1024
    )
    params = SamplingParams(max_tokens=STEPS + 50)
    for index in range(num_running):
        prompt = [(index * 7 + position) % 1000 for position in range(PROMPT_TOKENS)]
        scheduler.add_request(Request(str(index), prompt, params, hash_new_blocks=kv_cache.hash_new_blocks))
    plan_times, update_times = [], []
    while len(plan_times) < STEPS:
        begin = time.perf_counter()
        step = scheduler.schedule()
        planned = time.perf_counter()
        output = ModelRunnerOutput({request_id: [5] for request_id in step.num_scheduled_tokens})
        ready = time.perf_counter()
        scheduler.update_from_output(step, output)
        scheduler.outbox.take()
        if step.total_num_scheduled_tokens == num_running:  # everybody decodes
            plan_times.append(planned - begin)
            update_times.append(time.perf_counter() - ready)
    plan, update = (statistics.median(times) * 1e6 for times in (plan_times, update_times))
    return {
        "schedule_us": round(plan, 1),
        "update_us": round(update, 1),
        "step_us": round(plan + update, 1),
        "step_us_per_request": round((plan + update) / num_running, 2),
    }


def main() -> None:
    """Measure and print."""
    sizes = (1, 64, 256)
    result = {
        "benchmark": "scheduler",
        "prefix_caching": {str(size): measure(size) for size in sizes},
        "no_prefix_caching": {str(size): measure(size, enable_caching=False) for size in sizes},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
