"""Chat templates in an episode: messages to tokens and images, sampled tokens to a message.

Guarantees: it works on a copy of the tokenizer, or processor, of its own, as the main thread uses the trainer's at the
same time; tokens are those of GRPOTrainer's own methods, which are called here; what was sampled is never rendered
again; a processor sees every image once.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

from trl_a3po.episodes.image_rules import ImageRules, Message, has_image_column, image_parts, shown_prompt
from trl_a3po.protocol.images import PER_TOKEN, PromptImages

NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
"""Of a row whose prompt comes from its environment, as in TRL."""


class Rendered(NamedTuple):
    """The tokens of messages, and the images that they show."""

    token_ids: list[int]
    images: PromptImages | None = None


class ChatTemplates:
    """
    Args:
        processing_class: the trainer's tokenizer, or its processor. It is copied.
        chat_template: the template in place of the tokenizer's own; `None` for its own.
        chat_template_kwargs: as in `GRPOConfig`.
        tools: the tools of every prompt, as `apply_chat_template` takes them.
        environment_tools: where tools differ by environment: the tools of a prompt by the name of its environment.
        image_rules: of a processor; `None` for a tokenizer.
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] = (),
        environment_tools: Mapping[str | None, Sequence[Any]] | None = None,
        image_rules: ImageRules | None = None,
    ):
        self.image_rules = image_rules
        # The names under which GRPOTrainer's methods, which are called with this object, read them.
        self._is_vlm = image_rules is not None
        own = copy.deepcopy(processing_class)
        self.processing_class: Any = own if image_rules is None else KeepingProcessor(own)
        self._tokenizer: PreTrainedTokenizerBase = cast(Any, own if image_rules is None else cast(Any, own).tokenizer)
        self.chat_template = chat_template
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.tools = list(tools)
        self.environment_factories = self._env_tools = environment_tools
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))
        self._parses = any(getattr(self._tokenizer, name, None) for name in ("response_template", "response_schema"))

    def adapt(self) -> None:
        """Parse tool calls, and add messages without a change to earlier ones, where TRL knows how for this
        tokenizer's chat template. Other templates are used as they are."""
        if not self._parses:
            with contextlib.suppress(ValueError):
                add_response_schema(self._unwrapped)
                self._parses = True
        with contextlib.suppress(ValueError):
            self.chat_template = get_training_chat_template(self._unwrapped)

    def prompt(self, prompt: Any, environment: str | None = None) -> Rendered:
        """A prompt, text or messages, with the tools of its environment.

        Raises:
            ValueError: the tokens do not show the images of the messages.
        """
        self._batch_environments = [environment]
        token_ids, images, fields = GRPOTrainer._tokenize_prompts(cast(Any, self), [prompt])
        shown = images[0] if images else None
        return self.checked(list(token_ids[0]), PromptImages.made(shown, fields) if shown else None)

    def row(self, row: Mapping[str, Any], environment: str | None = None) -> tuple[Any, Rendered]:
        """The prompt of a row as reward functions receive it, and its tokens and images. Raises `ValueError` as
        `prompt` does, and for images that cannot be read."""
        if self.image_rules is None:
            return row["prompt"], self.prompt(row["prompt"], environment)
        messages = self.image_rules.shown(row)
        return messages if has_image_column(row) else row["prompt"], self.prompt(messages, environment)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Rendered:
        """A conversation, with tools of its own, up to where the policy answers. Raises `ValueError` as `prompt`
        does."""
        opened = self._opened(messages)
        ids = self._apply(opened, tools=list(tools or ()) or None, add_generation_prompt=True)
        return self.checked(ids, self._kept_images(opened, len(ids)))

    def suffix(self, messages: Sequence[Message]) -> Rendered:
        """What follows what was sampled when `messages` are added, up to where the policy answers.

        Raises:
            ValueError: with this template, adding messages changes what stands before them, or does not show their
                images.
        """
        messages = self._opened(messages)
        if messages[0]["role"] == "tool":
            ids = list(GRPOTrainer._get_tool_suffix_ids(cast(Any, self), messages))
            return self.checked(ids, self._kept_images(messages, len(ids)))
        # The difference of two renderings, after a conversation that stands for any other.
        before = self._opened([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        short = self._apply(before, add_generation_prompt=False)
        long = self._apply([*before, *messages], add_generation_prompt=True)
        ends = [place for place, token in enumerate(short) if token == self._tokenizer.eos_token_id]
        start = ends[-1] + 1 if ends else len(short)
        if long[:start] != short[:start]:
            raise ValueError(
                "The chat template of the tokenizer changes earlier messages when a message is added, so the tokens "
                "that were sampled cannot be continued: set processing_class.chat_template to one that does not."
            )
        return self.checked(long[start:], self._kept_images(messages, len(long) - start))

    def checked(self, token_ids: list[int], images: PromptImages | None = None) -> Rendered:
        """Tokens that show these images. Raises `ValueError` if they do not, or show others."""
        if self.image_rules is not None:
            self.image_rules.check(token_ids, images)
        return Rendered(token_ids, images)

    def shown(self, row: Mapping[str, Any], images: PromptImages | None) -> Any:
        """The prompt of a row, which shows `images`, as reward functions receive it."""
        if self.image_rules is None:
            return row.get("prompt", NO_PROMPT)
        return shown_prompt(row, images, NO_PROMPT)

    def message(self, token_ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Any] | None = None) -> Message:
        """The assistant's message that `token_ids`, sampled after `prefix`, are. Tool calls that cannot be parsed stay
        text."""
        if not self._parses:
            return {"role": "assistant", "content": self.text(token_ids)}
        try:
            return dict(parse_response(self._tokenizer, list(token_ids), prefix=list(prefix), tools=list(tools or ())))
        except RecursionError:  # of a thousand brackets in a call
            return {"role": "assistant", "content": self.text(token_ids)}

    def is_longer(self, texts: Sequence[str], tokens: int) -> bool:
        """Whether `texts` have more than `tokens` tokens for certain, since none of them is longer than the longest
        token of the vocabulary. It costs nothing, where making the tokens of megabytes takes long."""
        return sum(map(len, texts)) > tokens * self._longest_token

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stop_token(self, stop: int | str) -> int:
        """The id of a token to stop at, given by its id or its text.

        Raises:
            ValueError: the text is not one token.
        """
        if isinstance(stop, int):
            return stop
        ids = self._tokenizer.encode(stop, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"stop={stop!r} is {len(ids)} tokens of this tokenizer, and sampling stops at single tokens: give the "
                "text of one token, or its id."
            )
        return int(ids[0])

    @property
    def _unwrapped(self) -> Any:
        """The copy of the tokenizer, or the processor."""
        return self.processing_class if self.image_rules is None else self.processing_class.processor

    def _opened(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the tokenizer or the processor takes them."""
        if self.image_rules is None:
            return list(messages)
        return self.image_rules.shown({"prompt": list(messages)})

    def _apply(self, messages: list[Message], **options: Any) -> list[int]:
        options |= {"chat_template": self.chat_template, "tokenize": True, "return_dict": False}
        ids = self.processing_class.apply_chat_template(messages, **options, **self.chat_template_kwargs)
        return list(cast("list[int]", ids[0] if self._is_vlm else ids))

    def _kept_images(self, messages: Sequence[Message], length: int) -> PromptImages | None:
        """The images of `messages`, of which the processor has just made the last `length` tokens."""
        images = [part["image"] for part in image_parts(messages)] if self._is_vlm else []
        if not images:
            return None
        made = PromptImages.made(images, self.processing_class.made)
        for name in PER_TOKEN:
            if name in made.fields:
                made.fields[name] = made.fields[name][:, -length:]
        return made


class RefusedByProcessor(ValueError):
    """The processor has not made tokens of messages, for example because an image is too narrow."""


class KeepingProcessor:
    """A processor that keeps what it has made last, also where its caller asks for the tokens alone.

    Args:
        processor: the processor.

    Attributes:
        made: what it has made of the last conversation.
    """

    def __init__(self, processor: Any):
        self.processor = processor
        self.made: Mapping[str, Any] = {}

    def apply_chat_template(self, conversation: Any, *, return_dict: bool = False, **options: Any) -> Any:
        try:
            self.made = self.processor.apply_chat_template(conversation, return_dict=True, **options)
        except (ValueError, TypeError, RuntimeError, ArithmeticError, OSError) as error:
            raise RefusedByProcessor(f"the processor refuses the messages or their images: {error}") from error
        return self.made if return_dict else self.made["input_ids"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.processor(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)
