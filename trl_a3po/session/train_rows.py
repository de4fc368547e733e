"""`TrainRows`: the rows of `train_dataset` in training order, for the prompt stream and for the Trainer's dataloader.

Guarantees: every row is read once, in the main thread; it is read when GRPOTrainer's dataloader would read it, or
earlier if the queue needs it earlier. With `max_staleness=0`, a transform that looks at the progress of training so
sees what it would see under GRPOTrainer. The dataloader counts batches and holds no rows, because which rows a batch
has is decided when it is taken.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import datasets
from torch.utils.data import Dataset, IterableDataset

from trl_a3po.session.prompt_rows import NumberedRow, prompt_rows
from trl_a3po.session.resuming import RunState
from trl_a3po.session.temporarily import temporarily

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

Row = dict[str, Any]


class TrainRows:
    """An iterator of rows, which the prompt stream reads.

    Args:
        rows: rows in training order; `None` stands where an epoch of a stream ends.
        batch: rows of a generation batch.
        micro_steps: micro-steps for which the dataloader gives a generation batch.
        counted: rows before the first of `rows` that the dataloader counts too, because it begins earlier.
        kept: a prompt stream reads this iterator. Otherwise rows are only counted, and those of a dataset with a
            length are not read at all.

    Attributes:
        number: which row of the dataset the iterator has given last; `None` for a dataset without numbers.
    """

    def __init__(self, rows: Iterator[NumberedRow | None], *, batch: int, micro_steps: int, counted: int, kept: bool):
        self.batch = batch
        self.micro_steps = micro_steps
        self._rows = rows
        self._counted = -counted  # rows of the batches that the dataloader has given, minus those it began with
        self._is_kept = kept
        self.number: int | None = None
        self._kept: deque[NumberedRow] = deque()  # read, and not yet asked for
        self._number_read = 0
        self._epoch = 0  # of the dataloader
        self._epoch_ends: list[int] = []  # how many rows had been read
        self._ended = False

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        while not self._kept:
            if self._ended:
                raise StopIteration
            self._advance()
        self.number, row = self._kept.popleft()
        return row

    def reach(self, micro_step: int) -> None:
        """The dataloader of a dataset with a length has come to this micro-step of the run (0-based)."""
        wanted = (micro_step // self.micro_steps + 1) * self.batch + self._counted
        while self._is_kept and self._number_read < wanted and not self._ended:
            self._advance()

    def epoch(self) -> Iterator[int]:
        """The numbers of the batches of the next epoch of a stream; each has been read when it is yielded."""
        self._epoch += 1
        while True:
            ended = len(self._epoch_ends) >= self._epoch
            if self._counted + self.batch <= (self._epoch_ends[self._epoch - 1] if ended else self._number_read):
                self._counted += self.batch
                yield self._counted // self.batch
            elif ended or self._ended:
                return
            else:
                self._advance()

    def _advance(self) -> None:
        """Read one row more, or notice the end of an epoch or of all rows."""
        try:
            row = next(self._rows)
        except StopIteration:
            self._ended = True
            return
        if row is None:
            self._epoch_ends.append(self._number_read)
            return
        self._number_read += 1
        if self._is_kept:
            self._kept.append(row)


class UntakenRow(dict[str, Any]):
    """What the Trainer's dataloader gives in place of a row."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"{name!r} was read from a batch of the Trainer's dataloader, which holds no rows: which rows a batch has "
            "is decided when it is taken. _generate_and_score_completions(inputs) receives them, and on_group each "
            "finished group."
        )


class CountedRows(Dataset[UntakenRow]):
    """In place of a dataset with a length: one `UntakenRow` for each of its rows.

    Args:
        rows: what is told of each batch that is fetched.
        size: rows of the dataset.
        first_micro_step: number of the first micro-step of the run that is about to train.
    """

    def __init__(self, rows: TrainRows, size: int, first_micro_step: int):
        self._rows = rows
        self._size = size
        self._micro_step = first_micro_step

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, numbers: Sequence[int]) -> list[UntakenRow]:
        self._rows.reach(self._micro_step)
        self._micro_step += 1
        return [UntakenRow() for _ in numbers]


class CountedStream(IterableDataset[UntakenRow]):
    """In place of a stream, repeated as TRL repeats it: an epoch of `UntakenRow`s.

    Args:
        rows: what the epochs are read from.
        repeats: how often each row is given, all micro-steps of its batch together.
    """

    def __init__(self, rows: TrainRows, repeats: int):
        self._rows = rows
        self._repeats = repeats

    def __iter__(self) -> Iterator[UntakenRow]:
        for _ in self._rows.epoch():
            for _ in range(self._rows.batch * self._repeats):
                yield UntakenRow()


def train_rows(trainer: "A3POTrainer", resumed: RunState | None) -> TrainRows:
    """The rows of a run that begins, or that continues at `resumed`. None is read yet."""
    args = trainer.args
    queue = None if resumed is None else resumed.queue
    skips = not isinstance(trainer.train_dataset, datasets.IterableDataset) or not args.ignore_data_skip
    return TrainRows(
        prompt_rows(trainer, 0 if queue is None else queue.first_row),
        batch=args.groups_per_batch,
        micro_steps=args.micro_steps_per_generation,
        counted=0 if queue is None or not skips else queue.next_take * args.groups_per_take,
        kept=trainer._team.is_main,
    )


def counted_dataset(trainer: "A3POTrainer", rows: TrainRows, dataset: Any) -> "CountedRows | CountedStream":
    """What the dataloader reads in place of `dataset`, the train dataset as TRL gives it to a dataloader."""
    if isinstance(dataset, datasets.IterableDataset):
        return CountedStream(rows, trainer.args.num_generations * trainer.args.micro_steps_per_generation)
    return CountedRows(rows, len(dataset), trainer._step)


@contextmanager
def without_rows(trainer: "A3POTrainer") -> Iterator[None]:
    """Inside, a dataloader is made that reads in this process, and does not collate."""
    settings = {
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
    }
    with temporarily(trainer.args, **settings), temporarily(trainer, data_collator=list):
        yield
