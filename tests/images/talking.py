"""Tiny vision-language policies that call tools, a word a token, and what they are made to say."""

import re

from transformers import PreTrainedTokenizerFast

from tests.images.pictured import size_of
from tests.tiny import WORDS
from tests.vision import FAMILIES, PLACEHOLDERS, SPECIAL, picture, tokenizer

OWN_WORDS = ["call", "look", "note", "pair", "fail", "nothing", "tool", "number", "bare", "path"]
PLACEHOLDER = {"gemma3": "<boi>", "qwen2_5_vl": PLACEHOLDERS["qwen"], "qwen3_vl": PLACEHOLDERS["qwen"]}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }} {% else %}"
    "{% for part in m['content'] or [] %}{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}call {{ call['function']['name'] }} "
    "{% for name, value in call['function']['arguments'].items() %}{{ name }} {{ value }} {% endfor %}{% endfor %}"
    "{% if m['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class TalkingTokenizer(PreTrainedTokenizerFast):
    """Reads `call look w3` as a call of the tool `look` with the number 3."""

    def parse_response(self, response, schema=None, **options):
        text = self.decode(response, skip_special_tokens=True)
        found = re.findall(r"call (\w+) w(\d+)", text)
        calls = [
            {"type": "function", "function": {"name": name, "arguments": {"number": int(number)}}}
            for name, number in found
        ]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def words() -> list[str]:
    """The vocabulary, of the same size as that of `tests.vision`."""
    return [*SPECIAL, *WORDS[: -len(OWN_WORDS)], *OWN_WORDS]


def talking_processor(family: str):
    """The processor of a family, with a tokenizer and a template that know tools."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(words())}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([token for token in SPECIAL if token.startswith("<")])
    plain = tokenizer()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
    talking = TalkingTokenizer(tokenizer_object=made, **names)
    talking.response_schema = {"type": "object"}
    processor = FAMILIES[family].processor()
    for name, value in vars(processor.tokenizer).items():
        if name not in vars(plain) and name not in vars(talking):
            setattr(talking, name, value)
    processor.tokenizer = talking
    processor.chat_template = TEMPLATE.replace("PLACEHOLDER", PLACEHOLDER.get(family, "<image>"))
    return processor


def ids(text: str) -> list[int]:
    return [words().index(word) for word in text.split()]


def results_in(prompt_ids) -> int:
    """How many messages of tools a conversation holds."""
    return list(prompt_ids).count(words().index("tool"))


def picture_of(number: int):
    return picture(100 + number, *size_of(number))


def look(number: int) -> list:
    """Shows a picture.

    Args:
        number: of the picture

    Returns:
        the picture
    """
    return [{"type": "image", "image": picture_of(number)}]


async def note(number: int) -> str:
    """Says something.

    Args:
        number: what

    Returns:
        the text
    """
    return f"w{number} w{number}"


def pair(number: int) -> list:
    """Shows two pictures with a text before them.

    Args:
        number: of the first picture

    Returns:
        text and pictures
    """
    return [{"type": "text", "text": f"w{number}"}, *look(number), *look(number + 1)]


def fail(number: int) -> list:
    """Fails.

    Args:
        number: of the failure

    Returns:
        nothing
    """
    raise ValueError(f"w{number}")


TOOLS = [look, note, pair, fail]


def talk(prompt_ids, number: int) -> list[int]:
    """Turns with no, one and several calls, which show no, one and several pictures."""
    turn = results_in(prompt_ids)
    said = {
        0: [f"w1 w{number}"],
        1: [f"w2 call look w{number}", "call look w5", "w4 w5"],
        2: ["call look w3 call note w4", "", "call pair w5", "w6"],
        3: ["call fail w1 call nothing w2", "", "call look w1", "call note w3", "w7 w8"],
    }[number % 4]
    return [*ids(said[turn]), *ids("<eos>")]
