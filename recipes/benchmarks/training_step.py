"""What a step costs beside sampling: A3POTrainer and TRL's AsyncGRPOTrainer on the same completions, on one GPU.

    python recipes/benchmarks/training_step.py                               # one GPU, a 0.6B shape
    python recipes/benchmarks/training_step.py --micro_batch 64
    python recipes/benchmarks/training_step.py --arms a3po --shape tiny --cpu --tokens 32 --mean 16   # to try it

Nothing is sampled: both trainers are given the same random tokens, of geometric lengths, from memory. Batches are
always ready. `a3po:unshared` runs prompts once per completion.

`step` lasts from the end of a step to the end of the next one. `inside` is the part between the Trainer's
`on_step_begin` and `on_step_end`, which leaves out what a trainer does between two steps: AsyncGRPOTrainer packs its
batches there. The medians of all measured steps.
"""

import argparse
import pickle
import queue
import random
import threading
import time
from collections.abc import Sequence
from statistics import median

import torch
from arms import add_arguments, end_arm, first_token_reward, prompts, run_arms
from many_gpus import SHAPES
from ragged_lengths import policy
from vllm_publish import WARM, common, saved

COLUMNS = ("step", "inside", "tokens/s")
ARMS = ("a3po", "a3po:unshared", "async_grpo")
VOCAB = 512


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, arms=list(ARMS), timeout=120.0, json="training_step.json")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--completions", type=int, default=64, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a completion, at most")
    parser.add_argument("--mean", type=int, default=480, help="of the lengths, before they are cut")
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--weights_dir", default="/dev/shm", help="each arm gets a folder in it")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms) - set(ARMS):
        parser.error(f"the arms {sorted(unknown)} are not known: give some of {', '.join(ARMS)}")
    arguments.vocabulary = VOCAB
    return arguments


# --- what both trainers are given ---------------------------------------------------------------------------------


Completion = tuple[list[int], list[float], bool]  # tokens, log-probs, and whether it ends by itself


def completions(arguments) -> list[Completion]:
    """Those of the run, made before it begins."""
    noise, made = random.Random(0), []
    for _ in range(arguments.completions * (arguments.steps + WARM + arguments.max_staleness + 1)):
        length = 1 + int(noise.expovariate(1.0 / arguments.mean))
        ends, length = length <= arguments.tokens, min(length, arguments.tokens)
        ids = [noise.randrange(3, VOCAB) for _ in range(length)]
        logps = [noise.gauss(-6.24, 0.02) for _ in range(length)]
        made.append(([*ids[:-1], 1] if ends else ids, logps, ends))
    return made


class MemoryEngine:
    """An engine whose completions are ready. The second half of one has the version at which it is handed out, as an
    engine that samples through a publish stamps it; events are unpickled, as those of a worker are."""

    def __init__(self, made: list[Completion]):
        self._made, self._version, self._tokens = made, 0, 0
        self._pending, self._lock, self._weights = [], threading.Lock(), {}

    def start(self, spec, sampling, update):
        self._weights = {name: torch.empty_like(tensor) for name, tensor in update.tensors.items()}
        self.publish(update)

    def publish(self, update):
        for name, tensor in update.tensors.items():
            self._weights[name].copy_(tensor)
        with self._lock:
            self._version = update.version

    def submit(self, requests):
        with self._lock:
            self._pending += [(request, self._version) for request in requests]

    def wait(self, timeout):
        with self._lock:
            due, version = self._pending[:1], self._version
            del self._pending[:1]
        if not due:
            time.sleep(min(timeout, 0.005))
        return pickle.loads(pickle.dumps([self._finished(*one, version) for one in due]))

    def _finished(self, request, submitted, version):
        from trl_a3po.protocol.engine import GroupFinished
        from trl_a3po.protocol.records import Rollout

        rollouts = []
        for number in range(request.num_rollouts):
            ids, logps, ends = self._made[request.noise_key * request.num_rollouts + number]
            half = len(ids) // 2
            versions = [submitted] * half + [version] * (len(ids) - half)
            rollouts.append(Rollout(ids, logps, versions, "stop" if ends else "length"))
            self._tokens += len(ids)
        return GroupFinished(request.request_id, rollouts)

    def cancel(self, request_ids):
        with self._lock:
            self._pending = [one for one in self._pending if one[0].request_id not in set(request_ids)]

    def end_episodes(self, episodes):
        """There are none."""

    def score(self, prompt_ids, completion_ids, timeout):
        raise AssertionError("The delivery check is off.")

    def stats(self):
        from trl_a3po.protocol.engine import EngineStats

        return EngineStats(tokens=self._tokens, busy_seconds=1.0)

    def close(self):
        """There is nothing to end."""


class MemoryWorker:
    """The rollouts of AsyncGRPOTrainer. It also stands for the transfer of weights, which are sent nowhere."""

    def __init__(self, samples: Sequence):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def nothing(self, *args):
        """There is nothing to do."""

    start = stop = update_model_version = check_health = nothing
    init_weight_transfer = pause = resume = destroy = nothing


# --- the process of an arm ----------------------------------------------------------------------------------------


def clock(seconds: list[tuple[float, float]]):
    """A callback that appends the seconds of each optimizer step, from end to end and inside."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ended: float | None = None

        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - (self.ended or self.began), now - self.began))
            self.ended = now

    return Clock()


def train_a3po(arguments, made: list[Completion], seconds: list[tuple[float, float]], unshared: bool) -> None:
    from trl_a3po import A3POConfig, A3POTrainer

    tokenizer, model = policy(arguments)
    args = A3POConfig(
        **common(arguments),
        max_staleness=arguments.max_staleness,
        engine=MemoryEngine(made),
        delivery_check_steps=0,  # random log-probs are nobody's
        max_engine_gap=100.0,
        shared_prompt="off" if unshared else "auto",
    )
    args._n_gpu = 1
    rows = prompts(arguments.prompt_tokens, len(tokenizer))
    callbacks = [clock(seconds)]
    A3POTrainer(
        model, first_token_reward, args, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks
    ).train()


def train_async_grpo(arguments, made: list[Completion], seconds: list[tuple[float, float]]) -> None:
    import numpy as np
    from ragged_lengths import use_torch_kernel
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    use_torch_kernel()
    tokenizer, model = policy(arguments)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder, rows = saved(arguments, model, tokenizer), prompts(arguments.prompt_tokens, len(tokenizer))
    samples = []
    for number, (ids, logps, _) in enumerate(made):
        prompt = tokenizer(rows[number // 8]["prompt"])["input_ids"]
        sample = RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array([*prompt, *ids]),
            completion_mask=np.array([0] * len(prompt) + [1] * len(ids)),
            old_log_probs=np.array([0.0] * len(prompt) + logps, dtype=np.float32),
            advantage=(number % 8 - 3.5) / 2.4,
            model_version=number // arguments.completions,
            group_id=number // 8,
            metrics={"reward": 0.5},
        )
        samples.append(sample)
    args = AsyncGRPOConfig(
        **common(arguments),
        dtype="float32" if arguments.cpu else "bfloat16",
        vllm_server_base_url="http://127.0.0.1:9",  # is not called
        max_staleness=1000,
        token_budget=0,  # as many samples to a micro-batch as the other arms have
    )
    args._n_gpu = 1
    worker = MemoryWorker(samples)
    AsyncGRPOTrainer(
        str(folder),
        first_token_reward,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock(seconds)],
        rollout_worker=worker,
        weight_transfer=worker,
    ).train()


def train(arguments) -> None:
    made, seconds = completions(arguments), []
    if arguments.arm == "async_grpo":
        train_async_grpo(arguments, made, seconds)
    else:
        train_a3po(arguments, made, seconds, unshared=arguments.arm.endswith(":unshared"))
    step, inside = (median(values) for values in zip(*seconds[WARM:], strict=True))
    measured = made[WARM * arguments.completions :][: arguments.steps * arguments.completions]
    tokens = sum(len(ids) for ids, _, _ in measured) / arguments.steps
    result = {"steps": len(seconds) - WARM, "step": step, "inside": inside, "tokens/s": tokens / step}
    end_arm(arguments, result | {"seconds": [round(whole, 4) for whole, _ in seconds[WARM:]]})


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    run_arms(arguments, COLUMNS, folders=arguments.weights_dir, processes=lambda arm: 0)


if __name__ == "__main__":
    main()
