"""The prompts of a run: rows of the trainer's dataset, tokenised as TRL tokenises them.

Guarantees: with the same seed, rows come in the order of GRPOTrainer, also in a run that is resumed and with a sampler
of the user's own; no row is read before it is requested; a row that does not fit does not end a run
(`tokenize_or_leave_out`).
"""

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from datasets import Dataset, IterableDataset
from torch.utils.data import DistributedSampler

from trl_a3po.checks.data import (
    check_prompt,
    check_prompt_ids,
    check_rows,
    context_of,
    room_for_completion,
    stored_row,
    streamed,
)
from trl_a3po.checks.images import UnusableImages, UnusablePrompt, overlong_images
from trl_a3po.episodes.templates import NO_PROMPT
from trl_a3po.rollout.left_out import LeftOut
from trl_a3po.rollout.prompt_stream import TokenizedPrompt
from trl_a3po.session.prompt_images import tokenized_with_images

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

logger = logging.getLogger(__name__)

FIRST_ROWS = 8  # of which one has to be usable: if none is, the processor or the chat template is at fault


class NumberedRow(NamedTuple):
    """A row, and its number in a dataset that has numbers."""

    number: int | None
    row: dict[str, Any]


def prompt_rows(trainer: "A3POTrainer", first_row: int = 0) -> Iterator[NumberedRow | None]:
    """Dataset rows in the order of GRPOTrainer, epoch after epoch, beginning with row number `first_row`. The last
    batch of an epoch is left out if it is incomplete. `None` stands where an epoch of a stream ends."""
    args, dataset = trainer.args, trainer.train_dataset
    groups = args.groups_per_batch
    if isinstance(dataset, IterableDataset):
        rows = _streamed_rows(dataset.shuffle(seed=args.seed) if trainer.shuffle_dataset else dataset, groups)
        for row in _without_first(rows, first_row):
            yield None if row is None else NumberedRow(None, _used_columns(trainer, row))
    else:
        for number in itertools.islice(_sampled_rows(trainer), first_row, None):
            yield NumberedRow(number, _used_columns(trainer, stored_row(dataset, number)))


def tokenize_prompt(trainer: "A3POTrainer", row: dict[str, Any]) -> TokenizedPrompt:
    """The tokens of a row's prompt, as TRL makes them, and its images.

    Raises:
        ValueError: the row's prompt is not a valid prompt, or does not fit the model.
    """
    given = {"prompt": NO_PROMPT, **row} if trainer.environment_factories else row
    check_prompt(given, trainer.processing_class)
    if trainer.environment_factories:
        trainer._batch_environments = [_environment(trainer, row)]
    if trainer._is_vlm and not isinstance(given["prompt"], str):
        prompt = tokenized_with_images(trainer, given)
    else:
        prompt_ids, _, _ = trainer._tokenize_prompts([given["prompt"]])
        prompt = TokenizedPrompt(list(prompt_ids[0]))
    config, of_images = trainer.model.config.get_text_config(), overlong_images(trainer, prompt)
    check_prompt_ids(prompt.token_ids, row, trainer.args, config, of_images)
    return prompt


def first_prompt(trainer: "A3POTrainer") -> tuple[dict[str, Any], TokenizedPrompt]:
    """The first row of `train_dataset` that can be used, and its prompt.

    Raises:
        ValueError: the first `FIRST_ROWS` rows are all left out of a run, or one has a prompt that ends a run.
    """
    dataset = trainer.train_dataset
    stored = isinstance(dataset, Dataset)
    rows = (stored_row(dataset, number) for number in range(len(dataset))) if stored else streamed(dataset)
    faults: list[UnusablePrompt] = []
    for row in itertools.islice(rows, FIRST_ROWS):
        try:
            return row, tokenize_prompt(trainer, row)
        except UnusablePrompt as error:
            faults.append(error)
    raise ValueError(f"None of the first {len(faults)} rows of train_dataset can be used. Row 0: {faults[0]}")


def tokenize_or_leave_out(trainer: "A3POTrainer", row: dict[str, Any]) -> TokenizedPrompt | LeftOut:
    """As `tokenize_prompt`, or why the row is left out: its prompt does not fit, or its images cannot be used.
    Such a row has escaped `check_all_rows`, because it belongs to a stream, is made when it is read, or has images."""
    try:
        return tokenize_prompt(trainer, row)
    except UnusablePrompt as error:
        return LeftOut(error.reason, str(error))


def prompt_with_tokens(trainer: "A3POTrainer", row: dict[str, Any], token_ids: list[int]) -> TokenizedPrompt:
    """The prompt of a row that was tokenised in an earlier run: these tokens, with its images made again.

    Raises:
        ValueError: the images make other tokens than in that run.
    """
    if not trainer._is_vlm or isinstance(row["prompt"], str):
        return TokenizedPrompt(token_ids)
    made = tokenized_with_images(trainer, row)
    if made.images is not None and made.token_ids != token_ids:
        raise UnusableImages(
            f"The images of a row now make a prompt of {len(made.token_ids)} tokens that is not the one which was "
            f"sampled from before the checkpoint was saved ({len(token_ids)} tokens): resume with the dataset, the "
            "processor and the chat template of that run."
        )
    return made._replace(token_ids=token_ids)


def check_all_rows(trainer: "A3POTrainer") -> None:
    """Raise `ValueError` for a row of the trainer's datasets that cannot be sampled from (see `check_rows`), and warn
    of rows whose completions the model's context cuts short.

    Only a prompt of text that may be too long is tokenised: one with at least as many bytes as tokens would fit beside
    the tokens that the chat template adds, of which the first row has at least as many. Of prompts with images, the
    first one that can be used is, which says whether the processor and the model match.
    """
    args, tokenizer, config = trainer.args, trainer.processing_class, trainer.model.config.get_text_config()
    context = context_of(args, config)
    limits = [] if context is None else [context - args.max_completion_length]
    limits += [] if args.engine_max_prompt_tokens is None else [args.engine_max_prompt_tokens]
    added: list[int] = []
    rooms: list[int] = []

    def token_ids(row: dict[str, Any]) -> None:
        size = _text_bytes(row["prompt"])
        if added and size and (not limits or size + added[0] <= min(limits)):
            return
        tokens = tokenize_prompt(trainer, row).token_ids
        added[:] = added or [len(tokens)]
        if (room := room_for_completion(args, config, len(tokens))) is not None:
            rooms.append(room)

    check_rows("train_dataset", trainer.train_dataset, tokenizer, token_ids)
    if trainer._is_vlm and isinstance(trainer.train_dataset, Dataset) and not trainer.environment_factories:
        first_prompt(trainer)
    check_rows("eval_dataset", trainer.eval_dataset, tokenizer, token_ids)
    if rooms:
        logger.warning(
            "The prompts of %d rows leave fewer than max_completion_length=%d tokens in the model's context of %d "
            "tokens, at the least %d: completions of these rows end there, by length.",
            len(rooms),
            args.max_completion_length,
            context,
            min(rooms),
        )


def _environment(trainer: "A3POTrainer", row: dict[str, Any]) -> str | None:
    """The name of the row's environment, which decides its tools."""
    assert trainer.environment_factories is not None
    name = row.get("environment") if trainer._multi_environment else None
    if name not in trainer.environment_factories:
        known = ", ".join(map(repr, trainer.environment_factories))
        raise ValueError(
            f"A row has environment={name!r}, which is not among the environments of environment_factory ({known}): "
            "correct the row, or add the environment."
        )
    return name


def _text_bytes(prompt: str | list[dict[str, Any]]) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(repr(message).encode()) for message in prompt)


def _sampled_rows(trainer: "A3POTrainer") -> Iterator[int]:
    """Numbers of the dataset's rows, one per group, as the sampler of `_get_train_sampler` gives them to GRPOTrainer.

    GRPOTrainer takes `generation_batch_size` numbers for each micro-step, and generates for the first micro-step of a
    batch.

    Raises:
        ValueError: a batch of the sampler does not hold whole groups, or an epoch does not hold whole batches.
    """
    args, sampler = trainer.args, trainer._get_train_sampler(trainer.train_dataset)
    for epoch in itertools.count():
        if isinstance(sampler, DistributedSampler):  # as accelerate does; TRL's own counts epochs itself
            sampler.set_epoch(epoch)
        empty = True
        for micro_step, batch in enumerate(_batches(trainer, sampler)):
            if micro_step % args.micro_steps_per_generation == 0:
                empty = False
                yield from _one_of_each_group(trainer, batch)
        if empty:
            return


def _batches(trainer: "A3POTrainer", sampler: Iterable[int]) -> Iterator[list[int]]:
    """The batches of an epoch, `generation_batch_size` row numbers each."""
    size, numbers = trainer.args.generation_batch_size, iter(sampler)
    while len(batch := list(itertools.islice(numbers, size))) == size:
        yield batch
    if batch and not trainer.args.dataloader_drop_last:
        raise ValueError(
            f"The sampler of {type(trainer).__name__}._get_train_sampler ends an epoch with {len(batch)} row "
            f"numbers, fewer than generation_batch_size={size}: let it end with a whole batch, or set "
            "dataloader_drop_last=True."
        )


def _one_of_each_group(trainer: "A3POTrainer", batch: list[int]) -> list[int]:
    args, group = trainer.args, trainer.args.num_generations
    firsts = batch[::group]
    if batch != [number for number in firsts for _ in range(group)]:
        raise ValueError(
            f"{type(trainer).__name__}._get_train_sampler gives the rows {batch[:group]} for one group: as in "
            f"GRPOTrainer, a sampler must give every row num_generations={group} times in succession, and "
            f"every batch steps_per_generation * num_iterations={args.micro_steps_per_generation} times."
        )
    return firsts


def _streamed_rows(dataset: IterableDataset, groups: int) -> Iterator[dict[str, Any] | None]:
    for epoch in itertools.count():
        dataset.set_epoch(epoch)  # as the Trainer does: every epoch is shuffled differently
        whole_batches, batch = 0, []
        for row in streamed(dataset):
            batch.append(row)
            if len(batch) == groups:
                yield from batch
                whole_batches, batch = whole_batches + 1, []
        if whole_batches == 0:
            return
        yield None


def _without_first(rows: Iterator[dict[str, Any] | None], number: int) -> Iterator[dict[str, Any] | None]:
    """`rows` without the first `number` of them, and without the ends of epochs among these."""
    for row in rows:
        if number == 0:
            yield row
        elif row is not None:
            number -= 1


def _used_columns(trainer: "A3POTrainer", row: dict[str, Any]) -> dict[str, Any]:
    if not trainer.args.remove_unused_columns:
        return row
    trainer._set_signature_columns_if_needed()
    return {name: value for name, value in row.items() if name in trainer._signature_columns}
