"""What `push_to_hub` sends of a run's folder.

Guarantees: the model, its card, the tokenizer and the `Trainer`'s own files are sent as ever. What a run writes down
about its data stays here: the timeline, the kept rollouts, the tables of completions, logs of engines, and files of a
queue. A checkpoint is sent whole, queue included, if `hub_strategy` asks for checkpoints.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import trainer as transformers_trainer

from trl_a3po.session.temporarily import temporarily

STAYS_HERE = (
    "timeline*.jsonl",
    "rollouts*.jsonl",
    "completions/*",
    "a3po_*",
    "*/a3po_*",
    ".a3po_*",
    "*.log",
    "vllm/*",
)
"""Patterns of files that an upload of `output_dir` leaves out."""


@contextmanager
def without_records() -> Iterator[None]:
    """Inside, the `Trainer` uploads `output_dir` without the files of `STAYS_HERE`."""
    api: Callable[[], Any] = transformers_trainer.hf_api
    with temporarily(transformers_trainer, hf_api=lambda: _Uploads(api())):
        yield


class _Uploads:
    """The hub as the `Trainer` sees it, with more to leave out of an upload that leaves something out already: that of
    `output_dir`."""

    def __init__(self, api: Any):
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, ignore_patterns: list[str] | None = None, **kwargs: Any) -> Any:
        patterns = ignore_patterns and [*ignore_patterns, *STAYS_HERE]
        return self._api.upload_folder(ignore_patterns=patterns, **kwargs)
