"""Chat templates in an episode: messages to tokens, sampled tokens to a message.

Guarantees: it works on a copy of the tokenizer of its own, as the main thread uses the trainer's at the same time;
tokens are those of GRPOTrainer's own methods, which are called here; what was sampled is never rendered again.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

Message = dict[str, Any]


class ChatTemplates:
    """
    Args:
        tokenizer: the trainer's. It is copied.
        chat_template: the template in place of the tokenizer's own; `None` for its own.
        chat_template_kwargs: as in `GRPOConfig`.
        tools: the tools of every prompt, as `apply_chat_template` takes them.
        environment_tools: where tools differ by environment: the tools of a prompt by the name of its environment.
    """

    # The names under which GRPOTrainer's methods, which are called with this object, read them.
    _is_vlm = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] = (),
        environment_tools: Mapping[str | None, Sequence[Any]] | None = None,
    ):
        self.processing_class = self._tokenizer = copy.deepcopy(tokenizer)
        self.chat_template = chat_template
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.tools = list(tools)
        self.environment_factories = self._env_tools = environment_tools
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._parses = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))

    def adapt(self) -> None:
        """Parse tool calls, and add messages without a change to earlier ones, where TRL knows how for this
        tokenizer's chat template. Other templates are used as they are."""
        if not self._parses:
            with contextlib.suppress(ValueError):
                add_response_schema(self._tokenizer)
                self._parses = True
        with contextlib.suppress(ValueError):
            self.chat_template = get_training_chat_template(self.processing_class)

    def prompt_ids(self, prompt: Any, environment: str | None = None) -> list[int]:
        """The tokens of a prompt, text or messages, with the tools of its environment."""
        self._batch_environments = [environment]
        prompt_ids, _, _ = GRPOTrainer._tokenize_prompts(cast(Any, self), [prompt])
        return list(prompt_ids[0])

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The tokens of a conversation, with tools of its own, up to where the policy answers."""
        ids = self.processing_class.apply_chat_template(
            list(messages),
            tools=list(tools or ()) or None,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.chat_template_kwargs,
        )
        return list(cast("list[int]", ids))

    def suffix_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that follow what was sampled when `messages` are added, up to where the policy answers.

        Raises:
            ValueError: with this template, adding messages changes what stands before them.
        """
        if messages[0]["role"] == "tool":
            return list(GRPOTrainer._get_tool_suffix_ids(cast(Any, self), list(messages)))
        # The difference of two renderings, after a conversation that stands for any other.
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        options: dict[str, Any] = {"chat_template": self.chat_template, "tokenize": True, "return_dict": False}
        options |= self.chat_template_kwargs
        render = self.processing_class.apply_chat_template
        short = cast("list[int]", render(before, add_generation_prompt=False, **options))
        long = cast("list[int]", render([*before, *messages], add_generation_prompt=True, **options))
        ends = [place for place, token in enumerate(short) if token == self._tokenizer.eos_token_id]
        start = ends[-1] + 1 if ends else len(short)
        if long[:start] != short[:start]:
            raise ValueError(
                "The chat template of the tokenizer changes earlier messages when a message is added, so the tokens "
                "that were sampled cannot be continued: set processing_class.chat_template to one that does not."
            )
        return long[start:]

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
