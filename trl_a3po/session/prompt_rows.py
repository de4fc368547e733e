"""The prompts of a run: rows of the trainer's dataset, tokenised as TRL tokenises them.

Guarantees: with the same seed, rows come in the order of GRPOTrainer, also in a run that is resumed; no row is read
before it is requested.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from datasets import IterableDataset
from trl.trainer.utils import RepeatSampler

from trl_a3po.checks.data import check_prompt, check_prompt_ids

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer


def prompt_rows(trainer: "A3POTrainer", first_row: int = 0) -> Iterator[dict[str, Any]]:
    """Dataset rows in the order of GRPOTrainer, epoch after epoch, beginning with row number `first_row`. The last
    batch of an epoch is left out if it is incomplete."""
    args, dataset = trainer.args, trainer.train_dataset
    groups = args.groups_per_batch
    if isinstance(dataset, IterableDataset):
        rows = _streamed_rows(dataset.shuffle(seed=args.seed) if trainer.shuffle_dataset else dataset, groups)
        rows = itertools.islice(rows, first_row, None)
    else:
        sampler = RepeatSampler(
            data_source=dataset,
            mini_repeat_count=1,
            batch_size=groups,
            shuffle=trainer.shuffle_dataset,
            seed=args.seed,
        )
        indices = itertools.chain.from_iterable(itertools.repeat(sampler))
        rows = (dataset[index] for index in itertools.islice(indices, first_row, None))
    for row in rows:
        yield _used_columns(trainer, row)


def tokenize_prompt(trainer: "A3POTrainer", row: dict[str, Any]) -> list[int]:
    """The tokens of a row's prompt, as TRL makes them.

    Raises:
        ValueError: the row's prompt is not a valid prompt, or does not fit the model.
    """
    check_prompt(row, trainer.processing_class)
    prompt_ids, _, _ = trainer._tokenize_prompts([row["prompt"]])
    token_ids = list(prompt_ids[0])
    check_prompt_ids(token_ids, row, trainer.args, trainer.model.config.get_text_config())
    return token_ids


def _streamed_rows(dataset: IterableDataset, groups: int) -> Iterator[dict[str, Any]]:
    for epoch in itertools.count():
        dataset.set_epoch(epoch)  # as the Trainer does: every epoch is shuffled differently
        whole_batches, batch = 0, []
        for row in dataset:
            batch.append(row)
            if len(batch) == groups:
                yield from batch
                whole_batches, batch = whole_batches + 1, []
        if whole_batches == 0:
            return


def _used_columns(trainer: "A3POTrainer", row: dict[str, Any]) -> dict[str, Any]:
    if not trainer.args.remove_unused_columns:
        return row
    trainer._set_signature_columns_if_needed()
    return {name: value for name, value in row.items() if name in trainer._signature_columns}
