"""Whole weights as a checkpoint in a folder that the servers can read.

Guarantees: a checkpoint is whole: a publish of some weights is completed by those published before; the folder that
was written last stays until the next one is written, for servers that come back; tensors are gone through once.
"""

import copy
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trl_a3po.engines.vllm.weight_names import base_weights, has_nested_tower
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

_TRAINED, _REST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class CheckpointFolder:
    """
    Args:
        root: an empty folder, ours alone.
        spec: the policy, without an adapter (`merged_spec` makes it so).
    """

    def __init__(self, root: Path, spec: PolicySpec):
        self.root = root
        self.dtype = spec.dtype
        self._config = copy.deepcopy(spec.config)
        self._config.dtype = spec.dtype
        self._config.architectures = [spec.model_class.__name__]
        self._nested_tower = has_nested_tower(spec.config)
        self._number = 0
        self._names: set[str] = set()
        self.folder: Path | None = None

    def write(self, update: WeightUpdate) -> int:
        """Write `update` as the new `folder`; the one before it is removed. Returns its size in bytes.

        Raises:
            OSError: it cannot be written.
        """
        before, self._number = self.folder, self._number + 1
        folder = self.root / f"weights-{self._number}"
        folder.mkdir(parents=True)
        self._config.save_pretrained(folder)
        # One at a time: where weights are spread over processes, the next takes this one's place.
        tensors = {
            name: tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in base_weights(update.tensors, {}, nested_tower=self._nested_tower)
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _TRAINED, _METADATA)
        if before is None or update.complete:
            self._names = set(tensors)
        elif left_out := self._names - set(tensors):
            self._keep(before, folder, left_out)
        files = dict.fromkeys(self._names, _REST) | dict.fromkeys(tensors, _TRAINED)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        self.folder = folder
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return sum(tensor.nbytes for tensor in tensors.values())

    def _keep(self, before: Path, folder: Path, names: set[str]) -> None:
        """Complete the checkpoint in `folder` by what the one `before` has under `names`, copied once per run."""
        if (before / _REST).exists() and _stored(before / _REST) == names:
            try:
                os.link(before / _REST, folder / _REST)
            except OSError:  # the file system has no hard links
                shutil.copyfile(before / _REST, folder / _REST)
            return
        rest: dict[str, torch.Tensor] = {}
        for path in (before / _REST, before / _TRAINED):
            if path.exists():
                with safe_open(path, "pt") as file:
                    rest |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
        save_file(rest, folder / _REST, _METADATA)


_METADATA = {"format": "pt"}


def _stored(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())
