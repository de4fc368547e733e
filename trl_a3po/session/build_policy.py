"""The trainer's policy as its session publishes and checks it, in this process or spread over several, and its
size."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from trl_a3po.models.sharded import full_shape
from trl_a3po.planning.policy_size import PolicySize
from trl_a3po.publish.adapter_or_merged import check_frozen, published_sources
from trl_a3po.publish.fsdp_shards import FsdpShards
from trl_a3po.publish.local_policy import LocalPolicy
from trl_a3po.publish.partitioned import PartitionedPolicy, Shards
from trl_a3po.publish.zero_shards import ZeroShards
from trl_a3po.session.engine_gap import forward_dtype

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer


def build_policy(trainer: "A3POTrainer") -> LocalPolicy | PartitionedPolicy:
    """The trainer's policy. Every process calls this at the same place."""
    model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
    sources = published_sources(trainer.args, model)
    frozen = partial(check_frozen, trainer.args, model)
    if is_partitioned(trainer):
        main = trainer._team.is_main
        shards: Shards = FsdpShards(model, main) if trainer.is_fsdp_enabled else ZeroShards(main)

        def forward(input_ids: torch.Tensor, length: int) -> torch.Tensor:
            ids = input_ids.to(accelerator.device)
            return trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), length)[0]

        return PartitionedPolicy(trainer._team, model, shards, sources, forward, frozen)
    return LocalPolicy(model, sources, frozen)


def policy_size(trainer: "A3POTrainer") -> PolicySize:
    """How large the trainer's policy is, wherever its parts are."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    sizes = [(full_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    return PolicySize(
        parameters=sum(numbers for numbers, _ in sizes),
        trained=sum(numbers for numbers, requires_grad in sizes if requires_grad),
        dtype=str(forward_dtype(model, trainer.accelerator.mixed_precision)).removeprefix("torch."),
    )


def is_partitioned(trainer: "A3POTrainer") -> bool:
    """Whether no process holds all weights: with ZeRO-3 and with FSDP2."""
    return trainer.is_fsdp_enabled or zero_stage(trainer) == 3


def zero_stage(trainer: "A3POTrainer") -> int:
    """The ZeRO stage of DeepSpeed, 0 without DeepSpeed."""
    return trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0
