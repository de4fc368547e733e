"""`CheckpointHooks`: the hooks of `A3POTrainer` that write and read checkpoints and models.

Guarantees: a checkpoint that is written during training also holds the run (see `saving`); it is valid, deleted and
pushed only as a whole; whatever cannot be written raises `CheckpointError`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.distributed.fsdp import StateDictType
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.write_errors import as_checkpoint_error
from trl_a3po.checks.overrides import check_thread
from trl_a3po.config import A3POConfig
from trl_a3po.distributed.team import Team
from trl_a3po.episodes.episode import RolloutFunction
from trl_a3po.errors import CheckpointError
from trl_a3po.models.finite import ADVICE, not_finite
from trl_a3po.models.sharded import plain_class
from trl_a3po.models.unwrap import base_model
from trl_a3po.publish.quantised import keep_trained_dtypes
from trl_a3po.report.model_card import complete_model_card
from trl_a3po.rollout.group_filter import OnGroup
from trl_a3po.session.hub import without_records
from trl_a3po.session.renamed_weights import has_renamed, load_renamed
from trl_a3po.session.saving import save_run
from trl_a3po.session.session import Session
from trl_a3po.session.temporarily import temporarily

if TYPE_CHECKING:
    from trl_a3po.session.resuming import RunState


class CheckpointHooks(GRPOTrainer):
    """A part of `A3POTrainer`, which sets the attributes that are declared here."""

    args: A3POConfig
    model: PreTrainedModel  # or a PeftModel, which has the attributes of the model that it wraps
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    train_dataset: Dataset | IterableDataset
    shuffle_dataset: bool
    max_completion_length: int
    num_generations_eval: int
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    generation_config: GenerationConfig
    reward_weights: torch.Tensor
    reward_func_names: list[str]
    on_group: OnGroup | None
    rollout: RolloutFunction | None = None
    reward_funcs: list[Any]
    reward_processing_classes: list[Any]
    _recorded_from: int
    tools: list[Any]
    environment_factories: Any  # name -> what makes an environment, or `None`
    _standalone_tools: list[Any]
    _multi_environment: bool
    _env_tools: dict[str | None, list[Any]]
    _environment_pool: dict[str | None, list[Any]]
    _batch_environments: Any  # names of the environments of what is tokenised
    _logs: dict[str, Any]
    _buffered_inputs: Any  # the slices of the generation batch, or `None`
    _signature_columns: Any  # a list of names, or `None` before the first use
    _team: Team
    _session: Session | None
    _training_thread: int | None
    _running: bool
    _resumed: "RunState | None"  # what is resumed, as long as the run goes on
    _trained_version: int | None = None  # the version at which the last micro-step was trained
    _holds_push: bool = False

    def _show_row_weights(self) -> None:
        raise NotImplementedError

    def _end_evaluations(self) -> None:
        raise NotImplementedError

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)
        self._check_moment()
        if not self._running:  # outside of training there is no queue to save
            with as_checkpoint_error(f"Saving a checkpoint failed in {run_dir}"):
                super()._save_checkpoint(model, trial)
            return
        folder = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._show_row_weights()
        self._end_evaluations()
        _check_weights(self, folder)
        with _written_whole(self, folder):
            save_run(self, folder)
            # The new checkpoint is not valid yet: older ones are deleted, and the new one is pushed, after this block.
            with temporarily(self.args, save_total_limit=None), temporarily(self, _holds_push=True):
                super()._save_checkpoint(model, trial)
            if self.args.should_save:
                torch.save(self.args, folder / TRAINING_ARGS_NAME)  # again, with its save_total_limit
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            with as_checkpoint_error(f"Deleting older checkpoints failed in {run_dir}"):
                rotate_checkpoints(run_dir, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _check_moment(self) -> None:
        """Raise `RuntimeError` for a moment of a run that a checkpoint cannot hold."""
        if self._trained_version == self.state.global_step:
            raise RuntimeError(
                f"A checkpoint was asked for inside optimizer step {self.state.global_step + 1}, whose gradients it "
                "could not hold: set control.should_save=True in a callback, which saves at the end of the step, or "
                "save in on_step_begin, on_step_end or on_epoch_end."
            )
        if self._resumed is not None and not self._running:
            raise RuntimeError(
                f"A checkpoint was asked for at the resumed step {self.state.global_step}, before its first "
                "micro-step has brought back the queue: the checkpoint that is resumed holds this moment. Save after "
                "the next optimizer step."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        loads = model if model is not None else self.model
        with keep_trained_dtypes(self.model):
            if not self.is_fsdp_enabled and has_renamed(loads, Path(resume_from_checkpoint)):
                load_renamed(loads, Path(resume_from_checkpoint))
                return
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        with keep_trained_dtypes(self.model):
            whole = not self.is_deepspeed_enabled and not self.is_fsdp_enabled
            if whole and best is not None and has_renamed(self.model, Path(best)):
                load_renamed(self.model, Path(best))
                return
            super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        check_thread("save_model", self._training_thread)
        if _internal_call:  # part of a checkpoint, whose own error names the folder
            super().save_model(output_dir, _internal_call)
            return
        with as_checkpoint_error(f"Saving the model failed in {output_dir or self.args.output_dir}"), self._as_whole():
            super().save_model(output_dir, _internal_call)

    @contextmanager
    def _as_whole(self) -> Iterator[None]:
        """Inside, a model that FSDP shards is saved as a whole, whatever a checkpoint holds of it: `Trainer` would
        save nothing with SHARDED_STATE_DICT, and say nothing."""
        if not self.is_fsdp_enabled:
            yield
            return
        with temporarily(self.accelerator.state.fsdp_plugin, state_dict_type=StateDictType.FULL_STATE_DICT):
            yield

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._holds_push:
            with without_records():
                super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with without_records():
            return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            model = base_model(self.accelerator.unwrap_model(self.model))
            folder = self.args.output_dir
            complete_model_card(Path(folder) / "README.md", plain_class(model).__name__, self.hub_model_id or folder)


@contextmanager
def _written_whole(trainer: "CheckpointHooks", folder: Path) -> Iterator[None]:
    """Around the writing of `folder` by every process of the run. The folder is not a valid checkpoint inside the
    block, and is one after it.

    Raises:
        CheckpointError: something could not be written.
    """
    team, version, session = trainer._team, trainer.state.global_step, trainer._session
    advice = (
        "it cannot be resumed from, but the checkpoints saved before it can. Free space, or make output_dir writable, "
        "and resume."
    )
    with as_checkpoint_error(f"The checkpoint {folder} could not be written", advice):
        before = team.run_on_main(lambda: checkpoint.begin(folder))
        yield
        team.barrier()
        team.run_on_main(lambda: checkpoint.complete(folder, version, session.run if session else None, before))


def _check_weights(trainer: "CheckpointHooks", folder: Path) -> None:
    """Raise `CheckpointError` in every process if a trained weight is not a number in one of them: no later step would
    make it one again. Of a weight that is spread over processes, each looks at its part."""
    found = trainer._team.gather(not_finite(trainer.model))

    def refuse() -> None:
        for name in filter(None, found or ()):
            raise CheckpointError(
                f"The checkpoint {folder} is not written, because weights are not finite any more ({name!r}): a loss "
                f"or a gradient was NaN or infinite. Resume from the checkpoint before, {ADVICE}."
            )

    trainer._team.run_on_main(refuse)
