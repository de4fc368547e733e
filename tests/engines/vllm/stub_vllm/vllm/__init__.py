"""As much of vLLM as the worker of its engine uses, computed by transformers: every step is a clean forward.

Like vLLM with asynchronous scheduling, it begins a batch before it returns the one before: two are under way.
"""

import enum
import pkgutil
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.model_executor import model_loader
from vllm.v1.sample.sampler import Sampler

__version__ = "0.31.0"
BATCHES = 2


class FinishReason(enum.Enum):
    STOP = 0
    LENGTH = 1


class EngineArgs(SimpleNamespace):
    pass


class SamplingParams(SimpleNamespace):
    pass


class LLMEngine:
    @classmethod
    def from_engine_args(cls, arguments):
        engine = cls()
        engine.engine_core = SimpleNamespace(engine_core=EngineCore(arguments))
        return engine


@dataclass(eq=False)
class Sequence:
    request: SimpleNamespace
    ids: list[int]
    sampled: int = 0


class EngineCore:
    def __init__(self, arguments):
        self.most = arguments.max_num_seqs
        self.sequences: dict[str, Sequence] = {}
        self.batch_queue: deque[list[SimpleNamespace]] = deque(maxlen=BATCHES)
        self.scheduler = SimpleNamespace(has_requests=lambda: bool(self.sequences))
        torch.manual_seed(arguments.seed)
        self.model_executor = Executor(arguments)
        self.model = self.model_executor.worker.model

    def preprocess_add_request(self, request):
        return request, 0

    def add_request(self, request, wave):
        assert request.request_id not in self.sequences
        self.sequences[request.request_id] = Sequence(request, list(request.prompt_token_ids))

    def abort_requests(self, keys):
        for key in keys:
            self.sequences.pop(key, None)
        for batch in self.batch_queue:
            batch[:] = [output for output in batch if output.request_id not in keys]

    def reset_prefix_cache(self, running, connector):
        assert running

    def post_step(self, executed):
        pass

    def step_fn(self):
        if self.sequences:
            self.batch_queue.appendleft([self.sample(s) for s in list(self.sequences.values())[: self.most]])
            if len(self.batch_queue) < BATCHES:
                return None, True
        elif not self.batch_queue:
            return None, False
        return {0: SimpleNamespace(outputs=self.batch_queue.pop())}, True

    @torch.no_grad()
    def sample(self, sequence):
        params = sequence.request.sampling_params
        logits = self.model.network(torch.tensor([sequence.ids])).logits[0]
        prompt = None
        if params.prompt_logprobs is not None:
            rows = Sampler.compute_logprobs(logits[:-1])
            prompt = SimpleNamespace(logprobs=rows.gather(1, torch.tensor(sequence.ids)[1:, None]))
        token = torch.multinomial((logits[-1] / params.temperature).softmax(-1), 1).item()
        logps = Sampler.compute_logprobs(logits[-1:])[:, [token]]
        sequence.ids.append(token)
        sequence.sampled += 1
        stopped = token in params.stop_token_ids
        finish = (
            FinishReason.STOP if stopped else FinishReason.LENGTH if sequence.sampled == params.max_tokens else None
        )
        if finish is not None:
            del self.sequences[sequence.request.request_id]
        return SimpleNamespace(
            request_id=sequence.request.request_id,
            new_token_ids=[token],
            new_logprobs=SimpleNamespace(logprobs=logps),
            new_prompt_logprobs_tensors=prompt,
            finish_reason=finish,
        )


class Executor:
    """Runs the worker, extended as the arguments say, in this process."""

    def __init__(self, arguments):
        extension = pkgutil.resolve_name(arguments.worker_extension_cls)
        self.worker = type("Extended", (Worker, extension), {})(arguments)

    def register_failure_callback(self, callback):
        pass

    def collective_rpc(self, method):
        return [getattr(self.worker, method)()]


class Worker:
    rank = 0

    def __init__(self, arguments):
        self.load_config = arguments
        self.model = Model(AutoConfig.from_pretrained(arguments.model))
        model_loader.LOADERS[arguments.load_format](self.load_config).load_weights(self.model, None)

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def named_parameters(self, *args, **kwargs):
        return self.network.named_parameters(*args, **kwargs)

    @torch.no_grad()
    def load_weights(self, weights):
        own, loaded = dict(self.network.named_parameters()), set()
        for name, weight in weights:
            own[name].copy_(weight)
            loaded.add(name)
        return loaded
