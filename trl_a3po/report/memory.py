"""The memory of a trainer and of an engine, from the configuration and the model, before anything starts.

Guarantees: pure; only the shapes of the weights are read, so the model may be one without values (the device "meta").
What is not known is `None`.
"""

from dataclasses import dataclass
from typing import Self

from torch import nn
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.models.memory import FP32_BYTES, LayerShape, optimizer_bytes
from trl_a3po.models.sharded import full_shape

Model = PreTrainedModel | nn.Module


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of each process that trains.

    Args:
        weights, gradients: of the policy.
        states: of the optimizer, `None` if they are not known.
        activations: an estimate of what the forward pass of a micro-batch of the longest completions keeps, without
            their prompts.
    """

    weights: int
    gradients: int
    states: int | None
    activations: int

    @classmethod
    def of(
        cls,
        args: A3POConfig,
        model: Model,
        processes: int = 1,
        zero_stage: int = 0,
        optimizer: str | None = None,
        *,
        fsdp: bool = False,
    ) -> Self:
        """ZeRO-1 partitions the optimizer states, ZeRO-2 also the gradients, ZeRO-3 also the weights. FSDP2 shards all
        three, and under mixed precision accelerate has it train float32 weights.

        Args:
            model: the unwrapped policy.
            processes: number of processes that train.
            zero_stage: stage of DeepSpeed ZeRO; 0 without DeepSpeed.
            optimizer: the class of an optimizer that the caller has made; `None` for the one that `optim` names.
            fsdp: launched with FSDP2.
        """

        def share(stage: int) -> int:
            return processes if fsdp or zero_stage >= stage else 1

        sizes = _sizes(model, trains_fp32=fsdp and (args.bf16 or args.fp16))
        trained = [(numbers, size) for numbers, size, requires_grad in sizes if requires_grad]
        name = args.optim if optimizer is None else optimizer
        states = [(numbers, optimizer_bytes(name, size, deepspeed=zero_stage > 0)) for numbers, size in trained]
        known = [numbers * each for numbers, each in states if each is not None]
        size = 2 if args.bf16 or args.fp16 else max(size for _, size, _ in sizes)
        tokens = args.per_device_train_batch_size * args.max_completion_length
        shape, checkpointing = LayerShape.of(model.config), bool(args.gradient_checkpointing)
        return cls(
            weights=sum(numbers * size for numbers, size, _ in sizes) // share(3),
            gradients=sum(numbers * size for numbers, size in trained) // share(2),
            states=int(sum(known)) // share(1) if len(known) == len(states) else None,
            activations=shape.activation_bytes(tokens, size, checkpointing=checkpointing),
        )

    @property
    def held(self) -> int:
        """Without activations, and without states that are not known."""
        return self.weights + self.gradients + (self.states or 0)


def _sizes(model: Model, *, trains_fp32: bool) -> list[tuple[int, int, bool]]:
    """For each weight: its numbers, the bytes of one, whether it is trained."""
    return [
        (full_shape(p).numel(), FP32_BYTES if trains_fp32 and p.requires_grad else p.element_size(), p.requires_grad)
        for p in model.parameters()
    ]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of a `transformers` engine.

    Args:
        replica: of the policy.
        published: the published copy of what is trained.
        cache: of the longest completions in every slot, without their prompts.
    """

    replica: int
    published: int
    cache: int

    @classmethod
    def of(cls, args: A3POConfig, model: Model, slots: int, engine_bytes: int) -> Self:
        """
        Args:
            slots: completions that the engine decodes at a time.
            engine_bytes: bytes of one number in the engine.
        """
        sizes = [(full_shape(p).numel(), p.requires_grad) for p in model.parameters()]
        return cls(
            replica=engine_bytes * sum(numbers for numbers, _ in sizes),
            published=engine_bytes * sum(numbers for numbers, trained in sizes if trained),
            cache=slots * LayerShape.of(model.config).kv_values * args.max_completion_length * engine_bytes,
        )

    @property
    def held(self) -> int:
        return self.replica + self.published + self.cache
