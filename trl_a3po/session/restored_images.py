"""The images of queued episodes in a run that is resumed: what the processor makes of them is made once more.

Guarantees: the fields of a rollout's images are those that it was sampled with, as long as the settings of the image
processor are those of the saved run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trl_a3po.checkpoints.saved_images import with_images
from trl_a3po.checks.images import check_fields
from trl_a3po.models.image_token import image_token_of
from trl_a3po.protocol.images import PER_TOKEN, PromptImages
from trl_a3po.protocol.records import Rollout
from trl_a3po.rollout.queue_state import QueueState

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer


def with_saved_images(trainer: "A3POTrainer", queue: QueueState, images: Sequence[Any]) -> QueueState:
    """The queue with `images` in the places that stand for them.

    Raises:
        ValueError: a rollout does not show its images.
    """

    def restored(rollout: Rollout) -> Rollout:
        episode = rollout.episode
        if episode is None:
            return rollout
        shown = {name: with_images(getattr(episode, name), images) for name in ("prompt", "messages", "columns")}
        if episode.images is not None:
            own = [images[place] for place in episode.images]
            shown["images"] = made_again(trainer, own, [*episode.prompt_ids, *rollout.token_ids])
        return replace(rollout, episode=replace(episode, **shown))

    items = [
        replace(item, rollouts=None if item.rollouts is None else [restored(one) for one in item.rollouts])
        for item in queue.outstanding
    ]
    return replace(queue, outstanding=items)


def made_again(trainer: "A3POTrainer", images: Sequence[Any], token_ids: Sequence[int]) -> PromptImages:
    """What the processor makes of the images that `token_ids` show.

    Raises:
        ValueError: the tokens do not show these images.
    """
    processor: Any = trainer.processing_class
    if not images:
        return PromptImages((), {})
    message = {"role": "user", "content": [{"type": "image", "image": image} for image in images]}
    made = processor.apply_chat_template([[message]], tokenize=True, return_dict=True)
    whole, image_token = PromptImages.made(images, made), image_token_of(trainer.model.config)
    check_fields(processor, trainer.model, token_ids, whole)
    for name in PER_TOKEN:
        if name in whole.fields:
            kinds = [[int(token == image_token) for token in token_ids]]
            whole.fields[name] = torch.tensor(kinds, dtype=whole.fields[name].dtype)
    return whole
