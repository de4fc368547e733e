"""The trained policy of a run whose tensors are all in this process, as publishing and the delivery check use it.

Guarantees: the trained tensors are only read, also while other weights are used in their place; the training mode of
the module does not change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from trl_a3po.models.eval_mode import eval_mode
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.changed_weights import ChangedWeights
from trl_a3po.publish.fingerprint import Fingerprint, fingerprint
from trl_a3po.publish.perturbation import perturbed_weights
from trl_a3po.publish.weight_sources import WeightSource, local_update

Result = TypeVar("Result")
Model = PreTrainedModel | PeftModel


class LocalPolicy:
    """The trained policy of a run without partitioned weights.

    Args:
        model: the trained module, unwrapped.
        sources: the sources of the weights of an update, given the module.
        check_frozen: as in `ChangedWeights`.
    """

    def __init__(
        self,
        model: Model,
        sources: Callable[[Any], Mapping[str, WeightSource]],
        check_frozen: Callable[[set[str]], None] = lambda _: None,
    ):
        self._model = model
        self._sources = sources
        self._changed = ChangedWeights(sources(model), check_frozen, read_in_place=True)
        self._weights: dict[str, torch.Tensor] = {}

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        weights, also = self._weights, self._changed.names(self._sources(self._model))

        def evaluate(value: Callable[[], torch.Tensor]) -> torch.Tensor:
            return call_with_weights(self._model, weights, lambda _: value())

        return call_with_weights(
            self._model,
            weights,
            lambda model: local_update(self._sources(model), version, complete=complete, also=also, evaluate=evaluate),
        )

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._sources(self._model))

    def logps(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> torch.Tensor:
        return call_with_weights(
            self._model, self._weights, lambda model: probe_logps(model, prompts, completions, temperature)
        )

    @contextmanager
    def perturbed(self, strength: float) -> Iterator[None]:
        """Inside, `update` and `logps` use weights that are moved by `strength`."""
        self._weights = perturbed_weights(self._model, strength)
        try:
            yield
        finally:
            self._weights = {}


def call_with_weights(model: Model, weights: dict[str, torch.Tensor], function: Callable[[Any], Result]) -> Result:
    """`function(model)` while `model` has `weights` in place of its own parameters of these names."""
    if not weights:
        return function(model)
    given: dict[str, torch.Tensor] = {f"model.{name}": nn.Parameter(weight) for name, weight in weights.items()}
    result: Result = functional_call(_Applied(model, function), given, tie_weights=True)
    return result


class _Applied(nn.Module):
    def __init__(self, model: Model, function: Callable[[Any], Any]):
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        return self.function(self.model)


@torch.no_grad()
def probe_logps(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
) -> torch.Tensor:
    """`(N, T)` fp32 log-probs of the tokens of the completions, on the CPU: the model's plain forward in its own
    precision, without dropout, temperature applied.

    Args:
        prompts: N prompts of one length.
        completions: N completions of T tokens.
    """
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor(completions, device=device)
    ids = torch.cat([torch.tensor(prompts, device=device), tokens], dim=1)
    with eval_mode(model), _head_in_its_own_dtype(model):
        # Not `model(...)`: hooks belong to training.
        logits = model.forward(input_ids=ids, use_cache=False).logits
    length = tokens.shape[1]
    logps: torch.Tensor = (logits[:, -length - 1 : -1].float() / temperature).log_softmax(-1)
    return logps.gather(2, tokens[:, :, None])[:, :, 0].cpu()


@contextmanager
def _head_in_its_own_dtype(model: Any) -> Iterator[None]:
    """Inside, the output layer accepts hidden states of any dtype: TRL trains a bfloat16 copy of the output layer of a
    quantised model, whatever dtype the other layers compute in."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(head.weight.dtype), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()
