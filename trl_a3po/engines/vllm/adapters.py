"""LoRA adapters as vLLM loads them: a folder for each version, and which adapters it cannot serve.

Guarantees: a folder is complete before its name is used; a name stands for one set of weights for ever, also across
runs on one server; the folders of the newest `keep` versions stay, because a server may read one again.
"""

import copy
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import save_file

from trl_a3po.publish.policy import PolicySpec, WeightUpdate

PREFIX = "policy-"
_HEADS = re.compile(r"(^|\.)(lm_head|embed_tokens|wte|embed_in|embed_out)(\.|$)")


def adapter_obstacle(peft_config: object, tensor_names: Mapping[str, object] | set[str]) -> str | None:
    """Why vLLM cannot serve an adapter, in words that follow "because"; `None` if it can.

    Args:
        tensor_names: names of the trained tensors.
    """
    if type(peft_config) is not LoraConfig:
        return f"it is a {type(peft_config).__name__}, and vLLM serves LoRA alone"
    for name, words in (
        ("use_dora", "it is a DoRA adapter"),
        ("modules_to_save", "modules_to_save trains whole modules beside it"),
        ("trainable_token_indices", "trainable_token_indices trains embeddings beside it"),
        ("rank_pattern", "rank_pattern gives its layers different ranks"),
        ("alpha_pattern", "alpha_pattern gives its layers different scales"),
        ("lora_bias", "lora_bias trains biases"),
        ("target_parameters", "target_parameters adapts parameters outside of linear layers"),
        ("fan_in_fan_out", "fan_in_fan_out stores its layers transposed"),
    ):
        if getattr(peft_config, name, None):
            return f"{words}, which vLLM does not serve"
    if peft_config.bias != "none":
        return f"bias={peft_config.bias!r} trains biases, which vLLM does not serve"
    trained = {name for name in tensor_names if ".lora_" in name}
    if heads := sorted(name for name in trained if _HEADS.search(name.partition(".lora_")[0])):
        return f"it adapts {heads[0].partition('.lora_')[0]!r}, and vLLM serves no adapters of embeddings and heads"
    if beside := sorted(set(tensor_names) - trained):
        return f"{beside[0]!r} is trained beside it"
    return None


class AdapterFolders:
    """
    Args:
        root: an empty folder, ours alone.
        spec: the policy, with its adapter.
        keep: how many folders stay.
    """

    def __init__(self, root: Path, spec: PolicySpec, keep: int):
        self.root = root
        self._adapter = spec.adapter_name
        self._config = copy.deepcopy(spec.peft_config)
        self._config.inference_mode = True
        self._dtype = spec.dtype
        self._keep = keep
        self._run = uuid.uuid4().hex[:6]
        self._number = 0
        self.folders: dict[str, Path] = {}  # by name, the newest last

    @property
    def newest(self) -> str:
        return next(reversed(self.folders))

    def write(self, update: WeightUpdate) -> int:
        """Write the adapter of `update` under a new name, `newest`. Returns its size in bytes."""
        self._number += 1
        name = f"{PREFIX}{self._run}-v{update.version}-{self._number}"
        folder = self.root / name
        folder.mkdir(parents=True)
        tensors = {
            key.replace(f".{self._adapter}.", "."): tensor.detach().to("cpu", self._dtype, copy=True).contiguous()
            for key, tensor in update.tensors.items()
            if ".lora_" in key
        }
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        self._config.save_pretrained(folder)
        self.folders[name] = folder
        return sum(tensor.nbytes for tensor in tensors.values())

    def outdated(self) -> list[str]:
        """Names of the adapters beyond the newest `keep`."""
        return list(self.folders)[: -self._keep]

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folders.pop(name), ignore_errors=True)
