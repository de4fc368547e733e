"""Checks of the data: of datasets when the trainer is built, of each prompt when it is tokenised.

Guarantees: an error about a row shows that row, and its number where the dataset has numbers; what counts is what the
rows hold, not what the dataset says of its columns; nothing is changed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin
from trl.data_utils import is_conversational

from trl_a3po.checks.images import UnusablePrompt, check_placeholders
from trl_a3po.config import A3POConfig

IMAGES = ("images", "image")  # columns, the first of which TRL reads
UNDECODABLE = (OSError, ValueError, SyntaxError, ImportError)  # an image that is gone or broken, or an address
PIL_IMAGE = re.compile(r"<PIL\.[^>]* size=(\d+x\d+)[^>]*>")  # its repr
OTHER_MEDIA = ("video", "videos", "audio", "audios")


class OverlongPrompt(UnusablePrompt):
    """A prompt that does not fit the model or the engine."""

    reason = "with an overlong prompt"


def stored_row(dataset: Dataset, index: int) -> dict[str, Any]:
    """A row of the dataset. One whose images `datasets` cannot decode has them as they are stored, so that they are
    refused, or left out, as images of every other form are."""
    try:
        row: dict[str, Any] = dataset[index]
    except UNDECODABLE:
        if not set(IMAGES) & set(dataset.column_names) or dataset.format["type"] == "custom":
            raise
        row = dataset.with_format("arrow")[index].to_pylist()[0]
    return row


def streamed(dataset: IterableDataset) -> Iterator[dict[str, Any]]:
    """The rows of a stream, with images as in `stored_row`."""
    features = dataset.features
    if features is None or not set(IMAGES) & set(features) or dataset._formatting is not None:
        yield from dataset
        return
    for row in dataset.decode(False):
        try:
            decoded = features.decode_example(row)
        except UNDECODABLE:
            decoded = row
        yield decoded


def check_dataset(
    args: A3POConfig, dataset: Dataset | IterableDataset, tokenizer: Any, *, needs_prompt: bool = True
) -> None:
    """Raise `ValueError` for rows that cannot be prompts, and for fewer rows than one generation batch holds."""
    check_columns("train_dataset", dataset, tokenizer, needs_prompt=needs_prompt)
    groups = args.groups_per_batch
    if isinstance(dataset, Dataset):
        if len(dataset) < groups:
            raise ValueError(
                f"train_dataset has {len(dataset)} rows, fewer than the {groups} prompts of one generation batch "
                f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}): use "
                "more rows or a smaller batch."
            )
        first = stored_row(dataset, 0)
        if needs_prompt or "prompt" in first:
            check_prompt(first, tokenizer)
    elif args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(
            f"train_dataset is a stream, and with steps_per_generation={args.steps_per_generation} and "
            f"num_iterations={args.num_iterations} it may end inside an optimizer step, which is not supported: "
            "set steps_per_generation to a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}."
        )


def check_columns(name: str, dataset: Any, tokenizer: Any, *, needs_prompt: bool = True) -> None:
    """Raise `ValueError` for a dataset without prompts, unless environments give them, with a column that a reward
    function cannot receive, or with images that the tokenizer, or processor, cannot show; `name` is that of the
    trainer's argument."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_columns(f"{name}[{key!r}]", part, tokenizer, needs_prompt=needs_prompt)
        return
    columns = None if dataset is None else dataset.column_names
    if isinstance(dataset, Dataset) and len(dataset):  # `with_transform` makes columns that `column_names` lacks
        columns = list(stored_row(dataset, 0))
    if columns is not None and needs_prompt and "prompt" not in columns:
        raise ValueError(
            f"{name} has the columns {', '.join(sorted(columns))}, but no 'prompt': rename the column that holds the "
            "prompt, as text or as a list of messages."
        )
    for column in ("prompts", "completions"):
        if columns is not None and column in columns:
            raise ValueError(
                f"{name} has a column {column!r}, but every reward function receives an argument of that name beside "
                "the columns: rename the column."
            )
    _check_media(name, columns or (), tokenizer)


def check_rows(name: str, dataset: Any, tokenizer: Any, token_ids: Callable[[dict[str, Any]], object]) -> None:
    """Raise `ValueError` for a row of a dataset with numbered rows that cannot be a prompt or does not fit.

    A run would meet such a row hours later. Rows that a function makes when they are read are left for then: reading
    them may take long, or give other rows each time.

    Args:
        name: name of the trainer's argument.
        dataset: the dataset, or datasets by name.
        tokenizer: the tokenizer.
        token_ids: tokenises the prompt of a row, and raises `ValueError` if it does not fit. It is not asked for rows
            with images: reading and preparing all of them may take hours.
    """
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, tokenizer, token_ids)
        return
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or not len(dataset):
        return
    columns = [name for name in ("prompt", "environment") if name in dataset.column_names]
    rows = dataset.select_columns(columns) if "prompt" in columns else ()
    for number, (row, images) in enumerate(zip(rows, _image_counts(dataset), strict=False)):
        try:
            check_prompt(row, tokenizer)
            if not _shows_images(row, images):
                token_ids(row)
        except ValueError as error:
            raise ValueError(f"Row {number} of {name}: {error}") from None


def check_prompt(row: dict[str, Any], tokenizer: Any) -> None:
    """Raise `ValueError` unless the `prompt` of the row is text, or a list of messages that the tokenizer, or the
    processor, can show."""
    if "prompt" not in row:
        raise ValueError(f"A row of train_dataset has the columns {', '.join(sorted(row))}, but no 'prompt'.")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt or not is_conversational(row):
        raise ValueError(
            f"The prompt {_short(prompt)} is neither text nor a list of messages with 'role' and 'content': correct "
            f"or remove the row {_short(row)}."
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            "The prompts are lists of messages, but the tokenizer has no chat_template to format them with: set "
            "processing_class.chat_template, or give the prompts as text."
        )
    shows_images = isinstance(tokenizer, ProcessorMixin)
    other = _part_types(prompt) - ({"text", "image"} if shows_images else {"text"})
    if "image" in other:
        raise ValueError(
            f"A message contains an image, but processing_class is a {type(tokenizer).__name__}, which cannot show "
            "it: pass the processor of a vision-language model (transformers.AutoProcessor) and that model."
        )
    if other:
        raise ValueError(
            f"A message contains {', '.join(sorted(other))}, but only text and images are supported: show frames of "
            f"a video as images, and sound as text, or remove the row {_short(row)}."
        )


def check_conversational(row: dict[str, Any]) -> None:
    """Raise `ValueError` for a prompt that is text in a dataset with images, as TRL does."""
    if isinstance(row["prompt"], str):
        raise ValueError(
            "The dataset has images, but the prompt is text, in which they have no place: give the prompts as lists "
            f"of messages, to which the processor's chat template is applied. The row: {_short(row)}."
        )


def check_prompt_ids(
    token_ids: Sequence[int], row: dict[str, Any], args: A3POConfig, config: Any, of_images: str | None = None
) -> None:
    """Raise `ValueError` for a prompt without tokens, and for a prompt that does not fit the model's context or
    vocabulary.

    Args:
        of_images: how to shorten a prompt with images, in words.
    """
    if not token_ids:
        raise ValueError(
            f"A prompt has no tokens, so nothing can be sampled from it: correct or remove the row {_short(row)}."
        )
    shorter = f"{of_images}. Or remove" if of_images else "shorten or remove"
    longest, room = args.engine_max_prompt_tokens, room_for_completion(args, config, len(token_ids))
    if room is not None and room < 1:
        raise OverlongPrompt(
            f"A prompt of {len(token_ids)} tokens leaves no room for a completion in the model's context of "
            f"{context_of(args, config)} tokens: {shorter} the row {_short(row)}."
        )
    if longest is not None and len(token_ids) > longest:
        raise OverlongPrompt(
            f"A prompt has {len(token_ids)} tokens, more than engine_max_prompt_tokens={longest}: raise it, or "
            f"{shorter} the row {_short(row)}."
        )
    if not 0 <= min(token_ids) <= max(token_ids) < config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token ids from {min(token_ids)} to {max(token_ids)}, but the model's vocabulary is "
            f"0 to {config.vocab_size - 1}: pass the model's own tokenizer as processing_class. The row: "
            f"{_short(row)}."
        )


def context_of(args: A3POConfig, config: Any) -> int | None:
    """The most tokens that a prompt and its completion may have together; `None` without a limit.

    Args:
        config: the configuration of the policy's text model.
    """
    of_server = args.vllm_max_model_length if args.engine == "vllm" else None
    limits = [n for n in (getattr(config, "max_position_embeddings", None), of_server) if n is not None]
    return min(limits, default=None)


def room_for_completion(args: A3POConfig, config: Any, prompt_tokens: int) -> int | None:
    """How many tokens a completion may have where the context leaves fewer than `max_completion_length` beside the
    prompt; `None` where the completion may have all of these."""
    context = context_of(args, config)
    if context is None or prompt_tokens + args.max_completion_length <= context:
        return None
    return context - prompt_tokens


def _check_media(name: str, columns: Sequence[str], tokenizer: Any) -> None:
    shows_images = isinstance(tokenizer, ProcessorMixin)
    images = next((column for column in IMAGES if column in columns), None)
    if images is not None and not shows_images:
        raise ValueError(
            f"{name} has a column {images!r}, but processing_class is a {type(tokenizer).__name__}, which cannot show "
            "images: pass the processor of a vision-language model (transformers.AutoProcessor) and that model, or "
            "rename the column."
        )
    other = next((column for column in OTHER_MEDIA if column in columns), None)
    if other is not None and shows_images:
        raise ValueError(
            f"{name} has a column {other!r}, but only text and images are supported: put frames of a video into a "
            "column 'images', or rename the column if only reward functions read it."
        )


def _image_counts(dataset: Dataset) -> Iterator[int | None]:
    """How many images the columns of each row hold, without reading them; `None` without such a column."""
    column = next((column for column in IMAGES if column in dataset.column_names), None)
    if column is None:
        yield from [None] * len(dataset)
        return
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=1000):
        for value in table[column]:
            yield (len(value) if column == "images" else 1) if value.is_valid else 0


def _shows_images(row: dict[str, Any], images: int | None) -> bool:
    """Whether a row's prompt has images, of which its columns hold `images`, if there are such columns."""
    if images is not None:
        check_conversational(row)
        check_placeholders(row["prompt"], [None] * images)
    return bool(images) or "image" in _part_types(row["prompt"])


def _part_types(prompt: str | list[dict[str, Any]]) -> set[str]:
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return {part["type"] for content in contents if isinstance(content, list) for part in content}


def _short(value: Any) -> str:
    text = PIL_IMAGE.sub(r"<image of \1 pixels>", repr(value))
    return text if len(text) <= 200 else text[:200] + "…"
