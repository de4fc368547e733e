"""A worker that starts as a worker of some kind does, and fails at its first task.

`A3PO_TEST_WORKER` holds the kind ("transformers", "vllm" or "reward") and the fault.
"""

import os
import time

from trl_a3po.workers.process import parents_channel

FOREVER = 3600.0


def main() -> None:
    kind, fault = os.environ["A3PO_TEST_WORKER"].split()
    channel = parents_channel()
    if kind == "transformers":
        channel.receive_one()
        channel.send(("built",))
        channel.receive_one()
        channel.send(("loaded", 0))
    if kind == "reward":
        channel.receive_one()
        channel.send(("ready",))
    channel.receive_one()
    print("working", flush=True)
    match fault:
        case "exit":
            print("a last line", flush=True)
            os._exit(4)
        case "fork":
            if (child := os.fork()) != 0:
                print(f"child {child}", flush=True)
                os._exit(3)
        case "garbage":
            os.write(channel.fileno(), b"<html>502 Bad gateway</html>")
    time.sleep(FOREVER)


if __name__ == "__main__":
    main()
