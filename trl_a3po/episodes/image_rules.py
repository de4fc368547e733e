"""Images in the messages of an episode: what the results of tools become, and where images of a row stand.

Guarantees: a message that is made here shows images that can be read, as they were when it was made, or raises; a text
in it holds no token that stands for an image, whoever wrote it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.data_utils import prepare_multimodal_messages

from trl_a3po.protocol.images import PromptImages, is_image
from trl_a3po.protocol.plain_copy import plain_copy

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]


@dataclass(frozen=True)
class ImageRules:
    """What an episode may do with images, where the policy reads some.

    Args:
        opened: an image as users give it -> a copy of the image. Raises `ValueError` if it cannot be read.
        shown: a row -> its prompt, with the images of its columns in their places. Raises `ValueError`.
        check: raises `ValueError` unless tokens show these images and no others.
        tokens: the texts of the tokens that stand for images.
    """

    opened: Callable[[Any], "Image"]
    shown: Callable[[Mapping[str, Any]], list[Message]]
    check: Callable[[Sequence[int], PromptImages | None], None]
    tokens: tuple[str, ...]


def tool_content(result: Any, rules: ImageRules | None) -> Any:
    """What a tool returned as the content of its message: content parts as they are, an image as a part, and
    everything else as text. A part alone and a tuple of parts are lists of parts.

    Raises:
        ValueError: an image that the policy cannot be shown, or a part that is neither text nor an image.
    """
    if is_image(result):
        result = [{"type": "image", "image": result}]
    if _is_image_part(result):
        result = [result]
    if isinstance(result, tuple) and any(is_image(part) or _is_image_part(part) for part in result):
        result = list(result)
    if not isinstance(result, list):
        return plain_text(str(result), rules)
    if all(isinstance(part, Mapping) and "type" in part for part in result):
        return [_part(part, rules) for part in result]
    if any(is_image(part) for part in result):
        raise ValueError(
            "the result is a list of images and other things: return a list of content parts, such as "
            "{'type': 'image', 'image': ...} and {'type': 'text', 'text': ...}"
        )
    return result if rules is None else plain_text(str(result), rules)


def plain_text(text: str, rules: ImageRules | None) -> str:
    """The text with `?` for each lone surrogate, which no tokenizer can read, and a blank inside of each token that
    stands for an image. The policy can make a tool return both, by writing them into an argument."""
    for token in () if rules is None else rules.tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text.encode(errors="replace").decode()


def has_image_column(row: Mapping[str, Any]) -> bool:
    return "images" in row or "image" in row


def shown_prompt(row: Mapping[str, Any], images: PromptImages | None, default: list[Message]) -> Any:
    """The prompt of a row as reward functions receive it: with a column of images, as messages with `images`, which
    are those in its messages and those of its columns, in the order in which it shows them."""
    prompt = row.get("prompt", default)
    if not has_image_column(row) or isinstance(prompt, str):
        return prompt
    every = () if images is None else images.images
    in_messages = sum("image" in part for part in image_parts(prompt))
    shown = plain_copy(prepare_multimodal_messages(list(prompt), images=[*every[in_messages:]]))
    for part, image in zip(image_parts(shown), every, strict=True):
        part["image"] = image
    return shown


def image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The parts of messages that are images, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] == "image"]


def _is_image_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "image"


def _part(part: Mapping[str, Any], rules: ImageRules | None) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text" and isinstance(part.get("text"), str):
        return {**part, "text": plain_text(part["text"], rules)}
    if kind == "text":
        raise ValueError(f"a part of type 'text' holds {type(part.get('text')).__name__}: put a str under 'text'")
    if kind != "image":
        raise ValueError(f"the result has a part of type {kind!r}: only text and images are supported")
    if rules is None:
        raise ValueError("the result is an image, and the policy reads text alone")
    if "image" not in part:
        raise ValueError("a part of type 'image' holds no image: put it under 'image'")
    return {**part, "image": rules.opened(part["image"])}
