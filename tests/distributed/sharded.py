"""What two processes that share a model by FSDP2 publish, without a trainer: `torchrun … -m tests.distributed.sharded
FOLDER` saves, for each of `MODELS`, the update in `FOLDER/<model>.pt`, beside what the plain model gives."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.distributed.runs import leave
from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.distributed.team import Team
from trl_a3po.models.fsdp_groups import groups_complete
from trl_a3po.models.unwrap import base_model
from trl_a3po.publish import partitioned
from trl_a3po.publish.adapter_or_merged import published_sources, published_spec
from trl_a3po.publish.fsdp_shards import FsdpShards
from trl_a3po.publish.local_policy import LocalPolicy

BUCKET_BYTES = 10_000  # of the 138,000 of the tiny model
STRENGTH = 0.3
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "tied": {"tie_word_embeddings": True},
    "odd": {"vocab_size": 65, "intermediate_size": 65},  # which two processes cannot share evenly
    "lora": {"lora": {}},
    "merged": {"lora": {}, "lora_sync": "merged"},
    "merged-dora": {"lora": {"use_dora": True}, "lora_sync": "merged"},
    "merged-tied": {"lora": {}, "lora_sync": "merged", "tie_word_embeddings": True},
}


def build(lora: dict[str, Any] | None = None, lora_sync: str = "adapter", **config: Any) -> torch.nn.Module:
    """A model with random weights, a persistent buffer among them, that every call makes again."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(tiny_config(**config), dtype=torch.float32)
    model.model.register_buffer("scale", torch.randn(3))
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    return model


def shard(model: torch.nn.Module) -> None:
    """As accelerate does in a training: each layer, the output layer with the norm before it, and what is left."""
    policy, base = MixedPrecisionPolicy(param_dtype=torch.bfloat16), base_model(model)
    for layer in base.model.layers:
        fully_shard(layer, mp_policy=policy)
    tail = [base.model.norm, base.lm_head]
    if base.lm_head.weight is base.model.embed_tokens.weight:
        tail.append(base.model.embed_tokens)
    with groups_complete():
        fsdp.fully_shard(tail, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)


class Kept(FsdpShards):
    """Notes the most bytes of whole weights that this process is given at a time."""

    most = 0

    def _values(self, sources, whole):
        Kept.most = max(Kept.most, sum(weight.nbytes for weight in whole.values()))
        return super()._values(sources, whole)


def forward(model: torch.nn.Module) -> None:
    """Without a backward: FSDP leaves the root and the output layer whole, in bfloat16."""
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None])


def read(update) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in update.tensors.items()}


def run(folder: Path, name: str, team: Team) -> None:
    settings = MODELS[name]
    args = A3POConfig(str(folder / "args"), use_cpu=True, lora_sync=settings.get("lora_sync", "adapter"))
    plain, model = build(**settings), build(**settings)
    local = LocalPolicy(plain, published_sources(args, plain))
    sources = published_sources(args, model)
    shard(model)
    policy = partitioned.PartitionedPolicy(team, model, Kept(model, team.is_main), sources, lambda ids, length: ids)
    before = {n: p.to_local().clone() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    forward(model)

    def publish() -> dict[str, Any]:
        found = {"whole": read(policy.update(0, complete=True)), "changed": read(policy.update(1))}
        with policy.perturbed(STRENGTH):
            found["perturbed"] = read(policy.update(2))
            team.call_others("forward")
            forward(model)
            found["perturbed again"] = read(policy.update(2))
        found["restored"] = read(policy.update(3, complete=True))
        found["fingerprint moved"] = bool(policy.fingerprint().changed(first))
        return found

    def fingerprint() -> Any:
        return policy.fingerprint()

    team.on_call("forward", lambda: forward(model))
    first = team.run_on_main(fingerprint)
    found = team.run_on_main(publish)
    model.state_dict()  # has FSDP put the shards back, after the forward of the perturbed weights
    exact = all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters() if n in before)
    exact = not team.any(not exact)
    if team.is_main:
        with local.perturbed(STRENGTH):
            perturbed = read(local.update(2))
        saved = {
            "sharded": found,
            "plain": {"whole": read(local.update(0, complete=True)), "perturbed": perturbed},
            "changed": set(local.update(1).tensors),
            "exact": exact,
            "most": Kept.most,
            "class": published_spec(args, model, torch.float32).model_class.__name__,
        }
        torch.save(saved, folder / f"{name}.pt")


def main() -> None:
    dist.init_process_group("gloo")
    partitioned.BUCKET_BYTES = BUCKET_BYTES
    team = Team(timeout=60.0)
    for name in MODELS:
        run(Path(sys.argv[1]), name, team)
    leave()


if __name__ == "__main__":
    main()
