"""Datasets with pictures, and runs on them of both trainers."""

from datasets import Dataset, Features, Image, Value

from tests.runs import ScriptedGRPOTrainer, build
from tests.vision import FAMILIES, VOCAB, picture
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine, scripted_completion

FIRST_WORD = 20  # of the vocabulary: the tokens before it are special
COMPLETE = scripted_completion(VOCAB, 6, first_token=FIRST_WORD)
MESSAGES = [{"role": Value("string"), "content": Value("string")}]
SIZES = [(12, 12), (20, 16), (28, 12), (16, 24)]


class PicturedGRPOTrainer(ScriptedGRPOTrainer):
    complete = staticmethod(COMPLETE)


def size_of(number: int) -> tuple[int, int]:
    return SIZES[number % len(SIZES)]


def questions(rows: int = 8) -> list[list[dict[str, str]]]:
    """Prompts of different lengths, each different."""
    return [[{"role": "user", "content": f"w{i} w{i + 1}" + " w3" * (i % 3)}] for i in range(rows)]


def with_one_picture(rows: int = 8) -> Dataset:
    columns = {"prompt": questions(rows), "image": [picture(i, *size_of(i)) for i in range(rows)]}
    return Dataset.from_dict(columns, features=Features({"prompt": MESSAGES, "image": Image()}))


def with_pictures(counts: list[int]) -> Dataset:
    """A row for each of `counts`, with so many pictures."""
    pictures = [[picture(10 * i + j, *size_of(i + j)) for j in range(count)] for i, count in enumerate(counts)]
    features = Features({"prompt": MESSAGES, "images": [Image()]})
    return Dataset.from_dict({"prompt": questions(len(counts)), "images": pictures}, features=features)


def reward(completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def pictured(family: str, folder, trainer_class=A3POTrainer, **settings):
    """A trainer of the tiny model of `family` on rows with one picture each."""
    own = {"engine": StubEngine(COMPLETE)} if issubclass(trainer_class, A3POTrainer) else {}
    made = FAMILIES[family]
    defaults = {
        "reward_funcs": reward,
        "processing_class": made.processor(),
        "train_dataset": with_one_picture(),
        "max_steps": 2,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    model = settings.pop("model", None) or made.model()
    if settings.get("beta"):  # TRL loads the reference model from where the policy was loaded
        model.save_pretrained(folder / "model")
        model = str(folder / "model")
    return build(model, folder, trainer_class, **(own | defaults | settings))


async def pictured_turns(episode):
    """Three turns, after the first two of which the user shows another picture."""
    messages = list(episode.prompt)
    for turn in range(2):
        answer = await episode.sample(messages, max_new_tokens=8)
        part = {"type": "image", "image": picture(10 * episode.number + turn, *size_of(turn + episode.number))}
        messages += [answer.message, {"role": "user", "content": [{"type": "text", "text": "w3"}, part]}]
    await episode.sample(messages)
    return float(sum(episode.token_ids) % 7)
