"""How much memory the images of the queued prompts take, for the plan of a run.

Guarantees: an estimate that says what it was measured on; no more than `ROWS` rows are read.
"""

from typing import TYPE_CHECKING

from datasets import Dataset

from trl_a3po.checks.data import stored_row
from trl_a3po.checks.images import UnusablePrompt
from trl_a3po.models.memory import GIB
from trl_a3po.session.prompt_rows import tokenize_prompt

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

ROWS = 4


def image_memory(trainer: "A3POTrainer") -> str | None:
    """The memory of the images in the queue and in the batch that is trained, in words; `None` for a run whose first
    rows have none, or whose rows cannot be read without being used."""
    dataset, args = trainer.train_dataset, trainer.args
    if not trainer._is_vlm or not isinstance(dataset, Dataset) or trainer.environment_factories:
        return None
    sizes = [_bytes_of(trainer, number) for number in range(min(ROWS, len(dataset)))]
    if not any(sizes):
        return None
    each, ahead = sum(sizes) / len(sizes), args.staleness_bound // args.optimizer_steps_per_generation
    prompts = (ahead + 1) * args.groups_per_batch
    return (
        f"about {each * prompts / GIB:.2f} GiB for {prompts} prompts, in the queue and in the batch in training "
        f"({each / 2**20:.2f} MiB each, as in the first {len(sizes)} rows)"
    )


def _bytes_of(trainer: "A3POTrainer", number: int) -> int:
    try:
        images = tokenize_prompt(trainer, stored_row(trainer.train_dataset, number)).images
    except UnusablePrompt:  # which will be left out
        return 0
    return 0 if images is None else images.nbytes
