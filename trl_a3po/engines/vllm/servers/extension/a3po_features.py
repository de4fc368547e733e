"""The images of a prompt as vLLM's core takes them: in a process of the trainer (`vllm_core.py`), and on a server
(`a3po_images.py`). This file knows the insides of vLLM.

Guarantees: the core computes on the token ids and on the arrays that the trainer has. vLLM's own processing of images
is asked only where in those tokens each image is, and which part of the arrays belongs to it.

Written against vLLM 0.31: older ones are refused before. This file imports nothing of the trainer's package.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ImageFeatures:
    """
    Args:
        model_config: vLLM's, of a model whose folder holds the processor too.

    Raises:
        RuntimeError: vLLM has no processing of images for this model.
    """

    def __init__(self, model_config: Any):
        from vllm.multimodal import MULTIMODAL_REGISTRY

        if not model_config.supports_multimodal_inputs or model_config.using_transformers_backend():
            raise RuntimeError(
                f"vLLM has no code of its own for the images of {', '.join(model_config.architectures)}: set "
                "engine='transformers'."
            )
        self._dtype = model_config.dtype
        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config)

    def of(self, token_ids: Sequence[int], images: Sequence[Any], fields: Mapping[str, torch.Tensor]) -> list[Any]:
        """vLLM's features of the images that `token_ids` show, in the order of the tokens.

        Args:
            images: whose sizes alone are read: pictures of Pillow, or arrays `(height, width, 3)`.
            fields: what the trainer's processor has made of them.

        Raises:
            ValueError: vLLM does not find the images in the tokens.
        """
        items = self._processor.info.parse_mm_data({"image": list(images)})
        arrays = self._arrays(items, len(images), fields)
        expected = self._processor._get_mm_prompt_updates(items, {}, arrays)
        found = self._processor._find_mm_placeholders(list(token_ids), expected).get("image", [])
        ranges = [place.to_range() for place in found]
        check_places(token_ids, ranges, len(images))
        # An image keeps its name in a later turn that adds others.
        named = [
            (data, place, content_of(data.get_data())) for data, place in zip(arrays["image"], ranges, strict=True)
        ]
        return [_feature(*of_image) for of_image in named]

    def _arrays(self, items: Any, images: int, made: Mapping[str, torch.Tensor]) -> Any:
        """The fields that were `made` of so many images, divided among them. vLLM's code for the family runs as after
        its own call of the processor, which ours stands in for."""
        from transformers.feature_extraction_utils import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        processor, dtype = self._processor, self._dtype
        context, calls = processor.info.ctx, []

        def given(*call: Any) -> Any:
            calls.append(call)
            # Views, because some families remove a dimension in place.
            fields = {name: field.view(field.shape) for name, field in made.items()}
            return BatchFeature({n: f.to(dtype) if f.is_floating_point() else f for n, f in fields.items()})

        object.__setattr__(context, "call_hf_processor", given)  # the context is a frozen dataclass
        try:
            fields = processor._apply_hf_processor_main(items, {})
        finally:
            object.__delattr__(context, "call_hf_processor")
        arrays = MultiModalKwargsItems.from_hf_inputs(fields, processor._get_mm_fields_config(fields, {}))
        if len(calls) != 1 or len(arrays["image"]) != images:
            raise ValueError(
                f"vLLM divides what the processor makes into {len(arrays['image'])} of {images} images, "
                f"after {len(calls)} calls of the processor: it prepares this model's images in another way than the "
                "trainer. Set engine='transformers'."
            )
        return arrays


def of_sequence(features: Sequence[Any]) -> list[Any]:
    """The features for one more sequence: the core may drop what it has used."""
    return [_feature(f.data, f.mm_position, f.identifier) for f in features]


def _feature(data: Any, place: Any, name: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    return MultiModalFeatureSpec(data=data, modality="image", identifier=name, mm_position=place, mm_hash=name)


def check_attention(model_config: Any, backends: Sequence[Any]) -> None:
    """Raise `RuntimeError` where the tokens of an image attend to each other in both directions, as in Gemma 3, and
    `backends`, vLLM's attention, do not do so. On a CPU vLLM itself says nothing."""
    if model_config.is_mm_prefix_lm and not all(backend.supports_mm_prefix() for backend in backends):
        names = ", ".join(sorted({backend.get_name() for backend in backends}))
        raise RuntimeError(
            f"The tokens of an image attend to each other in both directions in {model_config.architectures[0]}, and "
            f"only backwards in the attention that vLLM has here ({names}), so its log-probs would not be the "
            "policy's: set engine='transformers'."
        )


def check_places(token_ids: Sequence[int], ranges: Sequence[Any], images: int) -> None:
    if len(ranges) != images:
        raise ValueError(
            f"vLLM finds {len(ranges)} of {images} images in the prompt's tokens: the processor or its chat template "
            "writes them in another way than vLLM expects of this model. Set engine='transformers'."
        )
    inside = [False] * len(token_ids)
    shown = set()
    for place in ranges:
        for position in range(place.offset, place.offset + place.length):
            inside[position] = True
            if place.is_embed is None or place.is_embed[position - place.offset]:
                shown.add(token_ids[position])
    if left := sum(token in shown for token, within in zip(token_ids, inside, strict=True) if not within):
        raise ValueError(
            f"{left} of the prompt's tokens stand for parts of an image, but belong to none of its {images} images: "
            "the images and the tokens were not made of the same prompt."
        )


def content_of(fields: Mapping[str, torch.Tensor]) -> str:
    """The same for the same arrays of an image: what vLLM keeps of it, it keeps under this name."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(fields):
        field = fields[name].contiguous()
        digest.update(f"{name} {field.dtype} {tuple(field.shape)}".encode())
        digest.update(field.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
