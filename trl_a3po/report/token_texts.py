"""The text of each token of a completion, as a person reads it there.

Guarantees: the texts of a completion's tokens, put together, are the completion with its special tokens; bytes of one
character that are spread over several tokens appear at the last of them.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # stands for bytes that are no character


class TokenTexts:
    """Decodes with `tokenizer`, each token id once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens."""
        decoded = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def each(self, token_ids: Sequence[int]) -> list[str]:
        """One text for each token."""
        for token_id in set(token_ids) - self._known.keys():
            self._known[token_id] = self._alone(token_id)
        texts = [self._known[token_id] for token_id in token_ids]
        return self._merged(token_ids, texts) if any(INCOMPLETE in text for text in texts) else texts

    def _merged(self, token_ids: Sequence[int], alone: Sequence[str]) -> list[str]:
        """The texts, where some token is not a character `alone`."""
        texts: list[str] = []
        pending: list[int] = []  # tokens that are no characters yet
        for token_id, text in zip(token_ids, alone, strict=True):
            if not pending and INCOMPLETE not in text:
                texts.append(text)
                continue
            pending.append(token_id)
            together = self.text(pending)
            complete = INCOMPLETE not in together or len(pending) >= 4  # the most bytes of a character
            texts.append(together if complete else "")
            pending = [] if complete else pending
        if pending:
            texts[-1] = self.text(pending)
        return texts

    def _alone(self, token_id: int) -> str:
        """The text of a token in the middle of others: some tokenizers drop the space before a first token."""
        once, twice = self.text([token_id]), self.text([token_id, token_id])
        return twice[len(once) :] if twice.startswith(once) else once
