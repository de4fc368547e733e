"""Tokens a second of the vLLM engine against vLLM's own `LLM.generate`, and what a publish costs meanwhile.

    python recipes/benchmarks/vllm_engine.py                                # on a GPU
    python recipes/benchmarks/vllm_engine.py --shape tiny --counts 4 8 --tokens 24 --cpu --vllm_python PYTHON

Random weights of the shape, prompts of random tokens, completions of equal length, each arm in a process of its own:
`offline` is `LLM.generate`, with and without log-probs, `worker` is `engine="vllm"`, and `server` the same with a vLLM
server on this machine. All get every prompt at once, for each of `--counts` sequences, after a round to warm up.
`worker` and `server` then publish weights with `--in_flight` sequences in flight: `publish` is what the trainer waits,
`loaded` what passes until the worker has the weights. `gap` is the mean distance of log-probs to those of a forward in
the trainer's process under the weights that a token is stamped with, and `other` that under the weights of another
version. It is measured before the publishes, and for rollouts that began after them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--tokens", type=int, default=256, help="tokens a completion")
    parser.add_argument("--prompt_tokens", type=int, default=200)
    parser.add_argument("--in_flight", type=int, default=240)
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--vllm_python", default=sys.executable)
    parser.add_argument("--arms", nargs="+", default=["worker", "server", "offline"])
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds an arm may take")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompts(arguments, count: int, salt: int) -> list[list[int]]:
    draw = random.Random(1000 * salt + count)
    highest = SHAPES[arguments.shape]["vocab_size"] - 1
    return [[draw.randint(3, highest) for _ in range(arguments.prompt_tokens)] for _ in range(count)]


def say(**numbers) -> None:
    print(json.dumps(numbers), flush=True)


def context_of(arguments) -> int:
    return arguments.prompt_tokens + arguments.tokens + 1


# --- vLLM's own ---------------------------------------------------------------------------------------------------


def offline(arguments) -> None:
    """Imports vLLM alone, whose environment need not have this library."""
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.folder,
        skip_tokenizer_init=True,
        dtype="float32" if arguments.cpu else "bfloat16",
        max_model_len=context_of(arguments),
        max_num_seqs=max(arguments.counts) + 1,
        enforce_eager=arguments.cpu,
        generation_config="vllm",
        **({} if arguments.cpu else {"gpu_memory_utilization": 0.6}),
    )
    say(arm="offline", start=time.perf_counter() - began)
    for logprobs in (0, None):
        params = SamplingParams(
            max_tokens=arguments.tokens, temperature=1.0, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        for count in arguments.counts:
            for salt in (1, 2):
                batch = [{"prompt_token_ids": ids} for ids in prompts(arguments, count, salt)]
                began = time.perf_counter()
                outputs = llm.generate(batch, params, use_tqdm=False)
                took = time.perf_counter() - began
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            say(arm="offline", logprobs=logprobs, sequences=count, tokens_per_second=tokens / took)


# --- the engine ---------------------------------------------------------------------------------------------------


def worker(arguments) -> None:
    from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        slots=max(arguments.counts),
        python=arguments.vllm_python,
        device=device_of(arguments),
        context=context_of(arguments),
        gpu_memory=0.6,
        threads=1 if arguments.cpu else None,
        start_timeout=arguments.timeout,
    )
    measure(arguments, engine, is_loading=lambda: engine._supervisor._loading)


def server(arguments) -> None:
    """A server started as the documentation says, which reads weights from a folder in memory."""
    from many_gpus import word_tokenizer
    from torch.distributed.elastic.utils.distributed import get_free_port
    from vllm_server import VLLMServer

    from trl_a3po.engines.vllm.servers.startup import ServerRequirements
    from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers

    folder, context = Path(arguments.folder), context_of(arguments)
    word_tokenizer(SHAPES[arguments.shape]["vocab_size"]).save_pretrained(folder)
    requirements = ServerRequirements(
        str(folder),
        "float32" if arguments.cpu else "bfloat16",
        context,
        context,
        ("processed_logprobs",),
        counts_tokens=True,
        options={"--max-num-seqs": str(max(arguments.counts))}
        | ({} if arguments.cpu else {"--gpu-memory-utilization": "0.6"}),
    )
    device = torch.device(device_of(arguments))
    log, threads = folder / "server.log", 1 if arguments.cpu else None
    began = time.perf_counter()
    serving = VLLMServer(arguments.vllm_python, requirements, device, log, port=get_free_port(), threads=threads)
    try:
        serving.wait_until_ready(arguments.timeout)
        say(arm="server", ready=time.perf_counter() - began)
        measure(arguments, VLLMServers([serving.server.url], folder=folder / "weights"))
    finally:
        serving.stop()


def measure(arguments, engine, is_loading=lambda: False) -> None:
    from trl_a3po.protocol.engine import GroupRequest, SamplingSettings

    models = [random_model(arguments, seed).to(device_of(arguments)) for seed in range(2)]
    models[0].config._name_or_path = arguments.folder  # by which a server is recognised
    began, numbers = time.perf_counter(), iter(range(10**9))
    try:
        engine.start(spec_of(models[0]), SamplingSettings(arguments.tokens), update_of(models[0], 0))
        say(arm=arguments.arm, start=time.perf_counter() - began)
        for count in arguments.counts:
            for salt in (1, 2):
                requests = [GroupRequest(next(numbers), 0, tuple(ids), 1) for ids in prompts(arguments, count, salt)]
                began = time.perf_counter()
                engine.submit(requests)
                finished = wait_for(engine, count)
                took = time.perf_counter() - began
            tokens = sum(len(event.rollouts[0].token_ids) for event in finished.values())
            say(arm=arguments.arm, sequences=count, tokens_per_second=tokens / took)
        before = engine.stats().tokens
        batch = {next(numbers): tuple(ids) for ids in prompts(arguments, arguments.in_flight, 3)}
        engine.submit([GroupRequest(number, 0, ids, 1) for number, ids in batch.items()])
        if arguments.arm == "worker":  # a server says how many there are when it is asked, at a publish
            while engine.stats().tokens < before + arguments.in_flight * arguments.tokens // 4:
                time.sleep(0.01)
        else:
            time.sleep(0.25 * took)
        for version, model in ((1, models[1]), (2, models[0]), (3, models[1])):
            began = time.perf_counter()
            engine.publish(update_of(model, version))
            took = time.perf_counter() - began
            while is_loading():
                time.sleep(0.0005)
            loaded, active = time.perf_counter() - began, engine.stats().active_rollouts
            say(arm=arguments.arm, version=version, publish=took, loaded=loaded, active=active)
        finished = wait_for(engine, arguments.in_flight)
        compare(arguments, models, batch, finished, version=0)
        batch = {next(numbers): tuple(ids) for ids in prompts(arguments, min(16, arguments.in_flight), 4)}
        engine.submit([GroupRequest(number, 0, ids, 1) for number, ids in batch.items()])
        compare(arguments, models, batch, wait_for(engine, len(batch)), version=3)
    finally:
        engine.close()


def device_of(arguments) -> str:
    return "cpu" if arguments.cpu else "cuda:0"


def wait_for(engine, count: int) -> dict:
    events, deadline = {}, time.monotonic() + 120
    while len(events) < count:
        assert time.monotonic() < deadline, engine.stats()
        events |= {event.request_id: event for event in engine.wait(1.0)}
    return events


@torch.no_grad()
def compare(arguments, models, batch, finished, version: int) -> None:
    """Says how far the tokens of a version are from a forward of its model, and of the other model."""
    gaps: list[list[float]] = [[], []]
    for number, ids in list(batch.items())[:16]:
        (rollout,) = finished[number].rollouts
        for which in range(2):
            model = models[(version + which) % 2]
            text = torch.tensor([[*ids, *rollout.token_ids]], device=model.device)
            logps = model(text).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
            clean = logps.gather(1, text[0, len(ids) :, None])[:, 0].tolist()
            of_version = zip(rollout.versions, rollout.logps, clean, strict=True)
            gaps[which] += [abs(logp - expected) for stamp, logp, expected in of_version if stamp == version]
    own, other = (sum(some) / max(1, len(some)) for some in gaps)
    say(arm=arguments.arm, version=version, tokens=len(gaps[0]), gap=own, other=other)


def random_model(arguments, seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPES[arguments.shape], tie_word_embeddings=True, eos_token_id=1)
    return Qwen3ForCausalLM(config).to(torch.float32 if arguments.cpu else torch.bfloat16).eval()


def spec_of(model):
    from trl_a3po.protocol.weights import PolicySpec

    return PolicySpec(type(model), model.config, model.dtype)


def update_of(model, version: int):
    from trl_a3po.protocol.weights import WeightUpdate

    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return WeightUpdate(version, named, complete=True)


def main() -> None:
    arguments = parse_arguments()
    if arguments.arm:
        {"offline": offline, "server": server, "worker": worker}[arguments.arm](arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_model(arguments, 0).save_pretrained(folder)
        for arm in arguments.arms:
            python = arguments.vllm_python if arm == "offline" else sys.executable
            command = [python, *sys.argv, "--arm", arm, "--folder", folder]
            try:
                subprocess.run(command, timeout=arguments.timeout, check=False)
            except subprocess.TimeoutExpired:
                print(f"{arm} took more than {arguments.timeout:.0f} s", flush=True)


if __name__ == "__main__":
    main()
