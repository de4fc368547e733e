"""Which metrics a person reads at a glance: those on the console and in `trainer.state.log_history`.

Guarantees: what is not logged by this package is always among them; trackers and other callbacks receive every metric,
as do the timeline and whoever called `trainer.log`; a callback that is added or removed while it is called has the
effect that it has in `Trainer`.
"""

import copy
from typing import Any, cast

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

PREFIX = "a3po/"
AT_A_GLANCE = (
    "a3po/staleness/mean",
    "a3po/staleness/max",
    "a3po/w/capped",
    "a3po/ess",
    "a3po/time/wait",
    "a3po/time/reward",
    "a3po/engine_gap/mean",
    "a3po/queue/ready",
)
ONCE_THEY_COUNT = (
    "a3po/outcomes/rejected",
    "a3po/outcomes/failed",
    "a3po/rows/left_out",
    "a3po/reward/timeouts",
    "a3po/reward/crashes",
    "a3po/engine/restarts",
    "a3po/vllm/servers_lost",
)
"""Counts of what has gone wrong so far: they are shown from the first time that it has."""


def at_a_glance(logged: dict[str, Any]) -> dict[str, Any]:
    """What a person reads of `logged`, with the metrics of this package at the end."""
    shown = {name: value for name, value in logged.items() if not name.startswith(PREFIX)}
    shown |= {name: logged[name] for name in AT_A_GLANCE if name in logged}
    return shown | {name: logged[name] for name in ONCE_THEY_COUNT if logged.get(name)}


class LogEvent(CallbackHandler):
    """Stands in for `handler` while the `Trainer` logs, and calls the same callbacks.

    Args:
        handler: the trainer's callback handler.
        shows_all: whether the console and `log_history` get every metric too.

    Attributes:
        entry: what was logged, as the `Trainer` added it to `log_history`; empty before it has.
    """

    def __init__(self, handler: CallbackHandler, *, shows_all: bool):
        vars(self).update(vars(handler))
        self._shows_all = shows_all
        self.entry: dict[str, Any] = {}

    def on_log(  # type: ignore[override]  # as CallbackHandler's, which has no types
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> TrainerControl:
        self.entry = state.log_history[-1]
        if self._shows_all:
            return cast(TrainerControl, super().on_log(args, state, control, logs, **kwargs))
        state.log_history[-1] = at_a_glance(self.entry)
        control.should_log = False
        for callback in self.callbacks:
            alone = copy.copy(self)
            alone.callbacks = [callback]
            shown = at_a_glance(logs) if _is_console(callback) else logs
            control = alone.call_event(  # type: ignore[no-untyped-call]  # transformers'
                "on_log", args, state, control, logs=shown, **kwargs
            )
        return control


def _is_console(callback: TrainerCallback) -> bool:
    return isinstance(callback, (PrinterCallback, ProgressCallback))
