"""What it costs the trainer's process to receive streamed tokens from vLLM servers: CPU time per token, and
throughput.

    python recipes/benchmarks/streaming.py                              # 64 rollouts, 200 decode steps a second
    python recipes/benchmarks/streaming.py --groups 32 --rate 0         # 256, as fast as they are received

The server is a stand-in that sends the events of vLLM 0.31, for rollouts of equal length. The main thread waits as a
trainer's does. The CPU time of the reading process is not counted, because that process exists to relieve this one.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trl_a3po.engines.vllm.pool import ServerPool
from trl_a3po.engines.vllm.pooled_server import ServedWeights
from trl_a3po.engines.vllm.server import Server, ServerInfo
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings

ROLLOUTS = 8  # of a group


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help=f"groups of {ROLLOUTS} rollouts, all in flight at once")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rollout")
    parser.add_argument("--rate", type=float, default=200.0, help="decode steps per second; 0: no limit")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # socket to serve at, in a separate process
    return parser.parse_args()


def event(index: int, place: int, tokens: int) -> bytes:
    """The event of one token, as an HTTP chunk."""
    token, logp = f"token_id:{1000 + place}", -10.234567 + place * 1e-5
    choice = {
        "index": index,
        "text": "",
        "logprobs": {
            "text_offset": [place],
            "token_logprobs": [logp],
            "tokens": [token],
            "top_logprobs": [{token: logp}],
        },
        "finish_reason": "length" if place == tokens - 1 else None,
        "stop_reason": None,
        "token_ids": [1000 + place],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    body = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1790000000}
    return chunk(f"data: {json.dumps({**body, 'model': 'policy', 'choices': [choice], 'usage': None})}\n\n".encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(path: str, tokens: int, rate: float) -> None:
    events = [b"".join(event(index, place, tokens) for index in range(ROLLOUTS)) for place in range(tokens)]

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        began = time.monotonic()
        for place in range(tokens):
            writer.write(events[place])
            await writer.drain()
            if rate:
                await asyncio.sleep(max(0.0, began + (place + 1) / rate - time.monotonic()))
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    print("ready", flush=True)
    await server.serve_forever()


def measure(pool: ServerPool, groups: int, first: int) -> tuple[float, float]:
    """CPU seconds of this process, and elapsed seconds, for `groups` groups."""
    cpu, began, done = time.process_time(), time.perf_counter(), 0
    pool.submit([GroupRequest(first + group, first + group, (1, 2, 3), ROLLOUTS) for group in range(groups)])
    while done < groups:
        for finished in pool.wait(1.0):
            assert isinstance(finished, GroupFinished), finished
            done += 1
    return time.process_time() - cpu, time.perf_counter() - began


def main():
    arguments = parse_arguments()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.tokens, arguments.rate))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        options = ["--serve", path, "--tokens", str(arguments.tokens), "--rate", str(arguments.rate)]
        server = subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE)
        server.stdout.readline()
        sampling = SamplingSettings(arguments.tokens)
        pool = ServerPool([Server(f"unix://{path}")], sampling, streams=True, request_timeout=600.0)
        try:
            (member,) = pool.members
            pool.admit(member, ServerInfo("0.31.0", "policy", 1 << 20, max_num_seqs=1 << 12))
            pool.set_served_weights(ServedWeights(0, "", ""), [member])
            measure(pool, 1, first=0)  # warm-up
            cpu, seconds = measure(pool, arguments.groups, first=1)
        finally:
            pool.close()
            server.kill()
            server.wait()
    tokens = arguments.groups * ROLLOUTS * arguments.tokens
    print(
        f"{arguments.groups * ROLLOUTS} rollouts in flight: {tokens / seconds:.0f} tokens/s, {cpu / tokens * 1e6:.1f} "
        f"microseconds of this process's CPU for a token"
    )


if __name__ == "__main__":
    main()
