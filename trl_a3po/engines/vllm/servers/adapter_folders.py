"""LoRA adapters as vLLM loads them: a folder for each version.

Guarantees: a folder is complete before its name is used; a name stands for one set of weights only, also across
runs on one server; the folders of the newest `keep` versions stay, because a server may read one again.
"""

import copy
import shutil
import uuid
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

PREFIX = "policy-"


class AdapterFolders:
    """
    Args:
        root: an empty folder, ours alone.
        spec: the policy, with its adapter.
        keep: how many folders stay.
    """

    def __init__(self, root: Path, spec: PolicySpec, keep: int):
        if spec.peft_config is None:
            raise ValueError("The policy has no adapter.")
        self.root = root
        self._adapter = spec.adapter_name
        config: Any = spec.peft_config
        self._config = copy.deepcopy(config)
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
