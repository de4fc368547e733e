"""When the takes of a run happen: pure arithmetic on micro-steps, optimizer steps and epochs.

Guarantees: `version_of_take` is the policy version (optimizer steps so far) at which the Hugging Face `Trainer` asks
for each generation batch, also when several batches share an optimizer step, or when an epoch ends in the middle of a
gradient accumulation window.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TakeClock:
    """The takes of one `train()` call.

    Args:
        micro_steps_per_take: micro-steps for which a generation batch is used
            (`steps_per_generation · num_iterations`).
        accumulation: micro-steps per optimizer step (`gradient_accumulation_steps`).
        micro_steps_per_epoch: micro-steps per epoch, `None` for a stream without epochs. The `Trainer` ends each epoch
            with an optimizer step, however few micro-steps are left for it.
        first_version: optimizer steps already done at the first take.
        last_version: optimizer steps at which the run ends (`max_steps`).
    """

    micro_steps_per_take: int
    accumulation: int
    micro_steps_per_epoch: int | None
    first_version: int
    last_version: int

    def version_of_take(self, take: int) -> int:
        """The version at which take number `take` (0-based) happens; nondecreasing."""
        micro_step = take * self.micro_steps_per_take
        if self.micro_steps_per_epoch is None:
            return self.first_version + micro_step // self.accumulation
        epoch, micro_step_in_epoch = divmod(micro_step, self.micro_steps_per_epoch)
        updates_per_epoch = -(-self.micro_steps_per_epoch // self.accumulation)
        return self.first_version + epoch * updates_per_epoch + micro_step_in_epoch // self.accumulation

    @property
    def total_takes(self) -> int:
        """How many takes happen before the run ends."""
        low, high = 0, 1
        while self.version_of_take(high) < self.last_version:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            if self.version_of_take(middle) < self.last_version:
                low = middle + 1
            else:
                high = middle
        return low
