"""vLLM's engine core in this process, stepped by hand: with `vllm_rank.py` and the extensions of a server, the code
that knows the insides of vLLM.

Guarantees:

- a step returns the tokens of one batch, with the version of the weights that the batch was computed from. With
  asynchronous scheduling, batches may be under way when weights change; their tokens carry the older version, because
  the GPU computes them before it copies the weights;
- log-probs are behavior log-probs: fp32, at the temperature, before every filter and penalty;
- sequences keep their place and their tokens when weights change.

Written against vLLM 0.22 to 0.31. The core is used below vLLM's front end (`LLMEngine.step`), which makes an object of
every token of every sequence, and takes as long as a decode step of a small model.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trl_a3po.engines.vllm.servers.extension.a3po_features import ImageFeatures, of_sequence
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.images import PromptImages

OLDEST, NEWEST = (0, 22), (0, 31)
OLDEST_WITH_IMAGES = (0, 31)
_ADAPTER = "policy"


class OtherVersion(RuntimeError):
    """vLLM is older or newer than what this code was written for."""


class Output(NamedTuple):
    """What a batch sampled for one sequence.

    Args:
        key: of the sequence.
        finish: "stop", "length", or whatever else vLLM ended the sequence with; `None` while it goes on.
        version: of the weights that the tokens were sampled from.
        prompt_logps: log-probs of the prompt's tokens but the first, for a sequence that asked for them.
    """

    key: str
    token_ids: list[int]
    logps: list[float]
    finish: str | None
    version: int
    prompt_logps: list[float] | None


class VLLMCore:
    """
    Args:
        options: of vLLM's `EngineArgs`.
        setup, handle: what the worker was told, and where the weights are.
        adapters: sequences are sampled with the adapter that `load_adapter` has loaded.
        images: prompts may have images, and the model's folder holds its processor.

    Raises:
        RuntimeError: this version of vLLM cannot be driven so, or has no images for this model.
    """

    def __init__(self, options: Mapping[str, Any], setup: Any, handle: Any, *, adapters: bool, images: bool = False):
        check_version(images=images)
        from vllm import EngineArgs, LLMEngine

        from trl_a3po.engines.vllm.process.vllm_rank import LOAD_FORMAT, Rank

        arguments = EngineArgs(
            load_format=LOAD_FORMAT,
            model_loader_extra_config={"setup": setup, "handle": handle},  # vLLM takes it to every rank
            logprobs_mode="raw_logprobs",
            worker_extension_cls=f"{Rank.__module__}.{Rank.__qualname__}",
            **options,
        )
        engine = LLMEngine.from_engine_args(arguments)
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._executor = self._core.model_executor
        self._executor.register_failure_callback(_end)  # a rank has died
        self._adapters = adapters
        self._images: ImageFeatures | None = None
        if images:
            self._images = ImageFeatures(engine.vllm_config.model_config)
            self._executor.collective_rpc("a3po_check_attention")
        self._versions: deque[int] = deque()  # of the batches under way
        self.version = 0

    # --- sequences ----------------------------------------------------------------------------------------------

    def features(self, token_ids: Sequence[int], images: PromptImages | None) -> list[Any]:
        """What `add` takes of the images that `token_ids` show.

        Raises:
            ValueError: vLLM does not find the images in the tokens, or was not started for prompts with images.
        """
        if images is None:
            return []
        if self._images is None:
            raise ValueError("A prompt has images, but vLLM was started without a processor, so it reads none.")
        return self._images.of(token_ids, images.images, images.fields)

    def add(self, key: str, token_ids: Sequence[int], params: Any, salt: str, features: Sequence[Any] = ()) -> None:
        """Begin a sequence after `token_ids`. Prefixes are shared among sequences with the same `salt`.

        Args:
            features: of the images that `token_ids` show, which may be given again.
        """
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=key,
            prompt_token_ids=list(token_ids),
            mm_features=of_sequence(features) or None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=_adapter_request("loaded") if self._adapters else None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def abort(self, keys: Sequence[str]) -> None:
        """End sequences at once; nothing more is returned for them."""
        if keys:
            self._core.abort_requests(list(keys))

    @property
    def idle(self) -> bool:
        """Whether no sequence is left and no batch is under way."""
        return not self._core.scheduler.has_requests() and not self._core.batch_queue

    def step(self) -> list[Output]:
        """Begin a batch, and return what the oldest batch under way has sampled; `[]` if that is not finished."""
        core = self._core
        under_way = len(core.batch_queue or ())
        outputs, executed = core.step_fn()
        core.post_step(executed)
        returned = outputs is not None
        begun = len(core.batch_queue or ()) - under_way + returned
        self._versions.extend([self.version] * begun)
        if not returned:
            return []
        version = self._versions.popleft()
        return [_output(output, version) for client in outputs.values() for output in client.outputs]

    # --- weights ------------------------------------------------------------------------------------------------

    def load_weights(self) -> None:
        """Load the weights of the whole base model in place."""
        self._executor.collective_rpc("a3po_load_weights")

    def load_adapter(self) -> None:
        """Load the adapter in place of the one before, for sequences under way too."""
        folder = self._executor.collective_rpc("a3po_write_adapter")[0]
        self._core.add_lora(_adapter_request(folder, load_inplace=True))

    def recompute(self) -> None:
        """Have the caches of all sequences computed anew."""
        self._core.reset_prefix_cache(True, False)

    def forget_images(self) -> None:
        """Have every image encoded anew, which weights that are loaded do not bring about: vLLM keeps what its vision
        tower made of an image. No sequence may be in the middle of an image."""
        if self._images is not None:
            # What `EngineCore.reset_encoder_cache` does, which warns of sequences under way.
            self._core.scheduler.reset_encoder_cache()
            self._executor.reset_encoder_cache()


def sampling_params(
    sampling: SamplingSettings, *, max_tokens: int | None = None, seed: int | None = None, score: bool = False
) -> Any:
    """vLLM's form of sampling settings. Every setting is given, so a model's own defaults decide nothing.

    Args:
        max_tokens: of the sequence, if not all of `sampling`.
        seed: of the sequence's own noise, which makes sampling slower.
        score: have the log-probs of the prompt returned, by a forward that reuses no cache.
    """
    from vllm import SamplingParams

    bias = dict.fromkeys(sampling.suppress_token_ids, -100.0)
    return SamplingParams(
        max_tokens=1 if score else sampling.max_new_tokens,
        min_tokens=0 if score else sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or 0.0,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has what ends a completion, and nothing else does
        logit_bias=bias or None,
        logprobs=0,
        prompt_logprobs=0 if score else None,
        seed=seed,
        detokenize=False,
    )


def check_version(*, images: bool = False) -> None:
    """Import vLLM.

    Args:
        images: prompts may have images.

    Raises:
        OtherVersion: this code was not written for this version of vLLM.
        Exception: whatever importing vLLM raises.
    """
    import vllm

    oldest = OLDEST_WITH_IMAGES if images else OLDEST

    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    from_source = len(numbers) < 2 or numbers < (0, 10)  # builds from source may call themselves 0.1
    if not from_source and not oldest <= numbers <= NEWEST:
        range_ = _named(NEWEST) if oldest == NEWEST else f"{_named(oldest)} to {_named(NEWEST)}"
        way_out = "set engine='transformers'" if images else "start a server and set vllm_server_urls"
        raise OtherVersion(
            f"engine='vllm' runs vLLM {range_} in a process of its own{' for prompts with images' * images}, and this "
            f"one is {vllm.__version__}: install another one, or {way_out}."
        )
    from vllm import EngineArgs, LLMEngine  # noqa: F401  # vLLM loads what it is made of when it is asked for it


def _named(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _output(output: Any, version: int) -> Output:
    logprobs, prompt = output.new_logprobs, output.new_prompt_logprobs_tensors
    return Output(
        output.request_id,
        output.new_token_ids,
        logprobs.logprobs[:, 0].tolist() if logprobs is not None else [],
        None if output.finish_reason is None else output.finish_reason.name.lower(),
        version,
        None if prompt is None else prompt.logprobs[:, 0].tolist(),
    )


def _end() -> None:
    """What is left of vLLM is of no use."""
    os._exit(1)


def _adapter_request(folder: str, **options: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(_ADAPTER, 1, folder, **options)
