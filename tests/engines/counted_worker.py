"""A worker of an engine that computes nothing, and fails where it is told to.

`A3PO_TEST_WORKER` holds a file, which gets a line for each start; where it fails, which is one of `MOMENTS`; and how:
"raises", or "is killed".
"""

import os
import signal

from trl_a3po.engines.worker_loop import run_worker

MOMENTS = ("building", "loading", "sampling", "later")  # later: once it has finished a group
FILE, MOMENT, HOW = os.environ["A3PO_TEST_WORKER"].split()


def reach(moment: str) -> None:
    """Fail, if this is the moment."""
    if moment == MOMENT:
        if HOW == "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError(f"no memory for {moment}")


class Decoder:
    """Finishes each request in a step of its own."""

    tokens = version = active_rollouts = turns_prefilled_again = finished = 0

    def __init__(self):
        self.requests = []

    @property
    def idle(self):
        return not self.requests

    @property
    def waiting_requests(self):
        return len(self.requests)

    def submit(self, request):
        self.requests.append(request)

    def score(self, prompt_ids, completion_ids):
        return [-1.0] * len(completion_ids)

    def step(self):
        from trl_a3po.protocol.engine import GroupFinished
        from trl_a3po.protocol.records import Rollout

        reach("later" if self.finished else "sampling")
        self.finished += 1
        return [GroupFinished(self.requests.pop(0).request_id, [Rollout([5], [-1.0], [0])])]


def _set_up(channel):
    with open(FILE, "a") as file:
        file.write("started\n")
    channel.receive_one()
    reach("building")
    channel.send(("built",))
    channel.receive_one()
    reach("loading")
    channel.send(("loaded", 0))
    return None, Decoder()


if __name__ == "__main__":
    run_worker(_set_up)
