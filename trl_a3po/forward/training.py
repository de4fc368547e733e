"""`TrainingForward`: the trainer's log-probs without padding tokens, or by TRL's padded forward where a packed forward
is not known to give the same result.

Guarantees: one forward of the model for each forward of TRL, on every rank, whether rows are packed, shared or padded;
results have the shapes of TRL's and the same zeros; current, old and reference log-probs are computed alike, so that
their differences are not those of two kernels; every reason to run padded is logged once.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.forward import cost
from trl_a3po.forward.attention import install_packed_attention, remove_packed_attention
from trl_a3po.forward.image_chunks import Outputs, forward_with_images
from trl_a3po.forward.layout import PackedBatch, lengths, pack, rows_by_prompt
from trl_a3po.forward.micro_batches import is_sum_over_rows, micro_batch_order, micro_batches_per_step
from trl_a3po.forward.packed import packed_logps
from trl_a3po.forward.packing_support import packing_refusal
from trl_a3po.forward.self_check import check_rows, compare_forwards
from trl_a3po.forward.zero_traces import ZeroTraces
from trl_a3po.models.attention_shape import head_dim
from trl_a3po.models.flash_kernels import kernel_refusal
from trl_a3po.models.unwrap import base_model

logger = logging.getLogger(__name__)


class TrainingForward:
    """Wraps TRL's `_get_per_token_logps_and_entropies`.

    Args:
        args: `packed_forward` and `shared_prompt` choose the layout.
        accelerator: the trainer's.
        models: the policy, and the reference model if there is a separate one.
        shows_images: prompts may have images. A forward is packed where no process has one with images.

    Raises:
        ValueError: `packed_forward="on"` or `shared_prompt="on"` for a model that can only be run padded, or for
            prompts that may have images.
    """

    def __init__(
        self,
        args: A3POConfig,
        accelerator: Accelerator,
        models: Sequence[torch.nn.Module],
        *,
        shows_images: bool = False,
    ):
        self._args = args
        self._accelerator = accelerator
        self._traces = ZeroTraces(accelerator)
        self._checked: set[int] = set()  # models, by id
        self._layout_logged = False
        self._shows_images = shows_images
        self.refusal = self._refusal(models)
        self._tokens_padded = self._tokens_run = 0  # of the last call
        # accelerate's way to them looks for installed packages each time, which takes milliseconds.
        self._unwrapped: dict[torch.nn.Module, torch.nn.Module] = {}
        self._bases = [base_model(self._inner(model)) for model in models]
        # TRL marks the images of tools with them in every family that has no grid.
        takes = all("token_type_ids" in inspect.signature(type(base).forward).parameters for base in self._bases)
        self._not_taken = () if takes else ("token_type_ids",)
        self.release()  # a model may come from a run that was killed

    def release(self) -> None:
        """Leave the models as they were before the first forward. A later forward prepares them again."""
        for base in self._bases:
            remove_packed_attention(base)
        self._unwrapped.clear()  # the next training wraps the model anew, and this one's gradients are not kept

    @property
    def token_ratio(self) -> float:
        """Tokens of the padded batch for each token that was run, in the last call."""
        return self._tokens_padded / max(self._tokens_run, 1)

    def description(self, model: PreTrainedModel) -> str:
        """How the forwards of `model`, unwrapped, will run: text for the plan of the run."""
        if self.refusal is not None:
            return f"padded: {self.refusal}"
        sharing = {"auto": "where that is cheaper", "on": "always", "off": "never"}[self._args.shared_prompt]
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._accelerator.mixed_precision)
        dtype = half or base_model(model).dtype
        refusal = kernel_refusal(self._accelerator.device, dtype, head_dim(model.config))
        kernel = "FlashAttention" if refusal is None else f"SDPA ({refusal})"
        images = "padded where a batch has images, else " if self._shows_images else ""
        checked = (
            "the first of them is checked against padded" if images else "the first batch is checked against padded"
        )
        return f"{images}packed, prompts shared {sharing}, attention by {kernel}; {checked}"

    def _refusal(self, models: Sequence[torch.nn.Module]) -> str | None:
        """Why every forward is padded; `None` where forwards may be packed."""
        if self._args.packed_forward == "off":
            return "packed_forward='off'"
        compiled = self._args.torch_compile
        refusals = [packing_refusal(self._accelerator.unwrap_model(model), compiled=compiled) for model in models]
        refusal = next((why for why in refusals if why is not None), None)
        if self._shows_images and "on" in (self._args.packed_forward, self._args.shared_prompt):
            refusal = "prompts may have images"
        if refusal is not None:
            self._run_padded(refusal, ValueError)
        return refusal

    def _run_padded(self, why: str, error: type[Exception]) -> None:
        """Log that forwards are padded from now on, or raise `error` where the settings demand packed ones."""
        for name in ("packed_forward", "shared_prompt"):
            if getattr(self._args, name) == "on":
                raise error(f"{name}='on' cannot hold: {why}. Set {name}='auto' to run padded.")
        logger.warning("Training forwards run padded: %s.", why)

    def __call__(
        self,
        padded: Callable[..., Outputs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Outputs:
        """What `padded`, TRL's method, returns for the arguments that follow it."""

        def traced(model: torch.nn.Module, *arguments: Any, **options: Any) -> Outputs:
            with self._traces.of(model):
                return padded(model, *arguments, **options)

        multimodal = {name: value for name, value in multimodal.items() if name not in self._not_taken}
        self._tokens_padded = self._tokens_run = input_ids.numel()
        needs_more = compute_aux_loss or any(value is not None for value in multimodal.values())
        if not self._packs(traced, model, input_ids, attention_mask, logits_to_keep, needs_more):
            return forward_with_images(
                traced,
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                images=multimodal,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
            )
        self._tokens_run = 0
        step = batch_size or len(input_ids)
        parts = [
            self._forward(traced, model, input_ids[rows], attention_mask[rows], logits_to_keep, compute_entropy)
            for rows in (slice(start, start + step) for start in range(0, len(input_ids), step))
        ]
        logps = torch.cat([logps for logps, _ in parts])
        entropies = [entropy for _, entropy in parts if entropy is not None]
        return logps, torch.cat(entropies) if compute_entropy else None, None

    def _packs(
        self,
        padded: Callable[..., Outputs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        needs_more: bool,
    ) -> bool:
        """Whether this forward is packed, which every process answers alike; `model` is left ready for it.

        Args:
            needs_more: this process needs what a packed forward does not give.
        """
        if self.refusal is not None:
            return False
        base = base_model(self._inner(model))
        if self._anywhere(needs_more, input_ids.device) if self._shows_images else needs_more:
            remove_packed_attention(base)
            return False
        install_packed_attention(base)
        self._check(padded, model, input_ids, attention_mask, width)
        return self.refusal is None

    def _anywhere(self, here: bool, device: torch.device) -> bool:
        """Whether `here` is true in any process; called by all of them."""
        if self._accelerator.num_processes == 1:
            return here
        return bool(self._accelerator.reduce(torch.tensor(float(here), device=device), "sum").item())

    def _inner(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` without what accelerate has put around it, now or when training began."""
        if model not in self._unwrapped:
            self._unwrapped[model] = self._accelerator.unwrap_model(model)
        return self._unwrapped[model]

    def _forward(
        self,
        padded: Callable[..., Outputs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        compute_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        packed = self._layout(base_model(self._inner(model)), input_ids, attention_mask, width)
        if packed is None:  # nothing to score, but the other ranks run a forward
            self._tokens_run += input_ids.numel()
            return padded(model, input_ids, attention_mask, width, compute_entropy=compute_entropy)[:2]
        self._tokens_run += packed.row.tokens
        outputs = self._run(model, input_ids, packed, width)
        if not self._layout_logged:
            self._layout_logged = True
            logger.info(
                "Training forwards are packed, attention by %s; shared_prompt=%r.",
                packed.row.cache["kernel"],
                self._args.shared_prompt,
            )
        return outputs

    def _run(
        self, model: torch.nn.Module, input_ids: torch.Tensor, packed: PackedBatch, width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base = base_model(self._inner(model))
        with self._accelerator.autocast(), self._traces.of(model):
            return packed_logps(model, base, input_ids, packed, width)

    def _layout(
        self, base: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
    ) -> PackedBatch | None:
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        unshared = pack(mask, width)
        if self._args.shared_prompt == "off":
            return unshared
        shared = pack(mask, width, rows_by_prompt(ids, mask, width))
        if unshared is None or shared is None:
            return None
        if not shared.row.shared or self._args.shared_prompt == "on":
            return shared
        if input_ids.is_cuda and shared.row.longest > shortest_window(base.config):
            return unshared  # the kernels cannot slide a window over a shared prompt
        flops = cost.ModelFlops.of(base.config)
        gain = cost.sharing_gain(flops, unshared.row, shared.row, len(shared.scoring))
        return shared if gain >= cost.MIN_SHARING_GAIN else unshared

    # --- the first batch ----------------------------------------------------------------------------------------

    def _check(
        self,
        padded: Callable[..., Outputs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
    ) -> None:
        """Run padded from now on unless both layouts give the padded log-probs of `model`, on every rank."""
        inner = self._inner(model)
        if id(inner) in self._checked:
            return
        self._checked.add(id(inner))
        ids, mask = check_rows(input_ids, attention_mask, width)
        groups = rows_by_prompt(ids.cpu(), mask.cpu(), width)
        half = (
            base_model(inner).dtype in (torch.bfloat16, torch.float16)
            or self._accelerator.mixed_precision in ("bf16", "fp16")
            or torch.get_float32_matmul_precision() != "highest"
        )
        verdicts = compare_forwards(
            inner,
            lambda ids, mask: padded(model, ids, mask, width)[0],
            {
                "packed": lambda ids, mask: self._packed_logps(model, ids, mask, width, ()),
                "shared prompt": lambda ids, mask: self._packed_logps(model, ids, mask, width, groups),
            },
            ids,
            mask,
            width,
            half=half,
        )
        if self._anywhere(not all(verdict.holds for verdict in verdicts), input_ids.device):
            self.refusal = "the self-check failed; " + "; ".join(map(str, verdicts))
            self._run_padded(self.refusal, RuntimeError)

    def _packed_logps(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        groups: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        packed = pack(attention_mask.cpu(), width, groups)
        if packed is None:
            raise ValueError("The rows of the self-check have no completion token.")
        return self._run(model, input_ids, packed, width)[0]

    # --- micro-batches ------------------------------------------------------------------------------------------

    def arranged(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a generation batch, with rows moved between those of one optimizer step so that
        completions of one prompt are together and costs are even; unchanged where that could change a gradient, and
        where a row has images."""
        args = self._args
        has_images = any(part.get("pixel_values") is not None for part in slices)
        if self.refusal is not None or has_images or not is_sum_over_rows(args):
            return slices
        together = micro_batches_per_step(len(slices), args.gradient_accumulation_steps)
        steps = [slices[start : start + together] for start in range(0, len(slices), together)]
        return [part for step in steps for part in (self._arranged_step(step) if together > 1 else step)]

    def _arranged_step(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = len(slices[0]["prompt_ids"])
        ids, mask = (
            torch.cat([torch.cat([part[f"prompt_{name}"], part[f"completion_{name}"]], 1) for part in slices]).cpu()
            for name in ("ids", "mask")
        )
        width = slices[0]["completion_ids"].shape[1]
        costs = [sum(tokens) for tokens in zip(*lengths(mask, width), strict=True)]
        shares = self._args.shared_prompt != "off"
        groups = rows_by_prompt(ids, mask, width) if shares else [[row] for row in range(len(ids))]
        order = torch.tensor(micro_batch_order(costs, groups, rows))
        return in_order(slices, order, rows)


def in_order(slices: list[dict[str, Any]], order: torch.Tensor, rows: int) -> list[dict[str, Any]]:
    """Micro-batches of `rows` rows each: those of all `slices`, in this `order`. Values that are not one per row are
    those of the first slice."""
    split = {
        name: torch.cat([part[name] for part in slices])[order.to(value.device)].split(rows)
        for name, value in slices[0].items()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    return [slices[0] | {name: parts[number] for name, parts in split.items()} for number in range(len(slices))]


def shortest_window(config: Any) -> float:
    """Tokens in the sliding window of a model's layers; infinite for a model without a sliding window."""
    config = config.get_text_config()
    layers = getattr(config, "layer_types", None)
    slides = layers is None or "sliding_attention" in layers
    window = getattr(config, "sliding_window", None) if slides else None
    return float("inf") if window is None else window
