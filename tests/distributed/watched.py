"""Two processes without a launcher, of which one fails while the other would wait indefinitely:
`python -m tests.distributed.watched FAULT [FILE]` with torchrun's variables set, or, given a file to find each other
by, RANK alone."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.workers.processes import until
from trl_a3po.distributed import rank_watch
from trl_a3po.distributed.team import Team


def main() -> None:
    rank_watch.EXIT_TIMEOUT = 2.0
    if sys.argv[1] == "hangs":
        rank_watch.HEARTBEAT_TIMEOUT = 3.0
    if sys.argv[1] == "goes on":
        rank_watch.HEARTBEAT_TIMEOUT, rank_watch.LONGEST_LOOK = 10.0, 2.0
    if len(sys.argv) > 2:
        found = {"init_method": f"file://{sys.argv[2]}", "rank": int(os.environ["RANK"]), "world_size": 2}
        dist.init_process_group("gloo", **found)
    else:
        dist.init_process_group("gloo")
    team = Team()
    with rank_watch.RankWatch(team, cleanup=lambda: print("freed", flush=True)):
        if sys.argv[1] == "goes on":
            print("watching", flush=True)
            until(Path(f"{sys.argv[2]}.over").exists, 200.0)
            return
        if team.rank == 0:
            time.sleep(3600)  # as in a collective that never ends
        time.sleep(3)
        if sys.argv[1] == "raises":
            raise ZeroDivisionError("of process 1")
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
