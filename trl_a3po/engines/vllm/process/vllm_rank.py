"""What is done in each of the processes that hold vLLM's model: its weights are loaded, and its log-probs are behavior
log-probs. Without tensor parallelism there is one such process, the worker itself; otherwise vLLM starts one for each
GPU, its ranks. Like `vllm_core.py`, this file knows the insides of vLLM, which imports it before it builds the model.

Guarantees: every rank reads the same memory, and vLLM takes what belongs to the rank out of each weight; a rank ends
when the worker does, however the worker ends.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.sample.sampler import Sampler

from trl_a3po.engines.staging import Handle, attach
from trl_a3po.engines.vllm.servers.extension.a3po_features import check_attention
from trl_a3po.engines.vllm.weight_names import adapter_weights, base_weights
from trl_a3po.workers.process import end_with

if TYPE_CHECKING:
    from trl_a3po.engines.vllm.process.vllm_worker import Setup

LOAD_FORMAT = "a3po"


class Rank:
    """What vLLM's own worker class is extended by; `VLLMCore` calls these methods in every rank."""

    rank: int  # this attribute and the next four are of vLLM's worker
    load_config: Any
    model_config: Any
    model_runner: Any
    reload_weights: Any

    def a3po_load_weights(self) -> None:
        """Load the weights of the whole base model in place. When this returns, they have been read."""
        self.reload_weights(weights_iterator=_weights(*_source(self.load_config)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def a3po_write_adapter(self) -> str | None:
        """Write the adapter as vLLM reads one, in the first rank alone. Returns its folder."""
        from safetensors.torch import save_file

        if self.rank != 0:
            return None
        setup, views = _source(self.load_config)
        folder = Path(setup.folder) / "adapter"
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.cpu() for name, tensor in adapter_weights(views, setup.adapter_name)}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(setup.adapter))
        return str(folder)

    def a3po_check_attention(self) -> None:
        """Raise `RuntimeError` where `check_attention` does."""
        backends = [group.backend for groups in self.model_runner.attn_groups for group in groups]
        check_attention(self.model_config, backends)


@register_model_loader(LOAD_FORMAT)
class StagedWeights(BaseModelLoader):  # type: ignore[misc]  # mypy does not see vLLM
    """Fills models that are built with our load format, without a file of weights."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        setup, views = _source(self.load_config)
        _set_temperature(setup.sampling.temperature)
        _unlink_shared_memory()
        expected = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(_weights(setup, views))  # type: ignore[operator]  # a method of vLLM's models
        if loaded is not None and (missing := expected - loaded):
            raise RuntimeError(f"vLLM's model has weights that the policy does not have: {sorted(missing)[:3]}.")


def _source(load_config: Any) -> "tuple[Setup, dict[str, torch.Tensor]]":
    """What the worker was told, and name -> the weight, where the trainer writes it."""
    told = load_config.model_loader_extra_config
    return told["setup"], _views(told["handle"])


@cache
def _views(handle: Handle) -> dict[str, torch.Tensor]:
    return attach(handle, device_index=0)  # the worker sees no other GPU than its own


def _weights(setup: "Setup", views: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the base model, under the names of a checkpoint."""
    return base_weights(views, setup.tied, nested_tower=setup.nested_tower)


def _set_temperature(temperature: float) -> None:
    """vLLM's log-probs are before the temperature ("raw_logprobs") or after every filter ("processed_logprobs");
    behavior log-probs are between these two."""

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() / temperature).log_softmax(dim=-1)

    if temperature != 1.0:
        Sampler.compute_logprobs = staticmethod(compute_logprobs)


def _unlink_shared_memory() -> None:
    """On a CPU, vLLM's ranks exchange tensors in files that nobody would remove; all ranks have opened them."""
    if group := os.environ.get("VLLM_DIST_IDENT"):
        for file in Path("/dev/shm").glob(f"{group}-*"):
            file.unlink(missing_ok=True)


if (worker := multiprocessing.parent_process()) is not None:
    end_with(worker.pid)
    signal.signal(signal.SIGTERM, lambda *_: None)  # as for the worker
