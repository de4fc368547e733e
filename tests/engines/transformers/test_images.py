"""Images in prompts, for every family: what is recorded is what a clean forward of the stamped weights gives, by the
model's own positions and masks; images are encoded once per group and version."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engines.transformers.running import events_of, started, train
from tests.engines.transformers.test_parked_slots import turn_after
from tests.engines.transformers.tiny_models import load, moved, run, settings
from tests.vision import FAMILIES, VOCAB, messages, picture
from trl_a3po.engines.transformers.decoder import SlotDecoder
from trl_a3po.protocol.engine import GroupFinished, GroupRequest
from trl_a3po.protocol.images import PromptImages, grown
from trl_a3po.publish.collect import collect_weights

pytestmark = pytest.mark.long

LENGTH, TOLERANCE = 8, 1e-4
PROMPTS = [
    ("w1 w2 w3", [picture(0)]),
    ("w4", [picture(1, 30, 16), picture(2, 12, 28)]),
    ("w5 w6 w7 w8 w9 w1 w2", []),
    ("w3 w2", [picture(3, 9, 40)]),
]


def image_request(processor, number: int, text: str, pictures, rollouts: int = 3) -> GroupRequest:
    fields = processor.apply_chat_template(
        [messages(text, *pictures)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt"},
    )
    ids = fields.pop("input_ids")[0].tolist()
    del fields["attention_mask"]
    images = PromptImages(tuple(pictures), dict(fields)) if pictures else None
    return GroupRequest(number, number, tuple(ids), rollouts, images=images)


def requests_of(family: str) -> list[GroupRequest]:
    processor = FAMILIES[family].processor()
    return [image_request(processor, number, text, pictures) for number, (text, pictures) in enumerate(PROMPTS)]


def decoder_of(model, length: int = LENGTH, **changes) -> SlotDecoder:
    image_tokens = (5, 7)  # as a trainer has them suppressed: they would be taken for an image
    sampling = settings(length, suppress_token_ids=image_tokens)
    return SlotDecoder(model, sampling, **{"slots": 5, "max_prompt_tokens": 120, **changes})


def errors(model, request: GroupRequest, rollout) -> torch.Tensor:
    """How far each recorded log-prob is from a clean forward's, whose positions and masks are the model's own."""
    fields = {} if request.images is None else request.images.fields
    ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
    kinds = {name: torch.zeros_like(ids) for name in fields if name.endswith("token_type_ids")}
    for name, of_whole in kinds.items():
        of_whole[:, : fields[name].shape[1]] = fields[name]
    with torch.no_grad():
        logits = model(ids, **{**fields, **kinds}).logits[0, len(request.prompt_ids) - 1 : -1].float()
    clean = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    return (clean - torch.tensor(rollout.logps)).abs()


class Encoded:
    """Counts how often a decoder's model encodes images with all that stands before them, and how often only images
    that a later turn adds."""

    def __init__(self, decoder: SlotDecoder):
        self.times = self.added = 0
        forward = decoder._forward
        prefill, extend = forward.prefill_images, forward.extend_images

        def counted(*args):
            self.times += 1
            return prefill(*args)

        def counted_added(*args):
            self.added += 1
            return extend(*args)

        forward.prefill_images, forward.extend_images = counted, counted_added


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_all_kinds_in_one_batch(family, deterministic):
    model, requests = FAMILIES[family].model(), requests_of(family)
    decoder = decoder_of(model, deterministic=deterministic)
    encoded = Encoded(decoder)
    groups = run(decoder, requests)
    for request in requests:
        for rollout in groups[request.request_id]:
            assert errors(model, request, rollout).max() < TOLERANCE
    assert encoded.times == 3  # the fourth prompt has no image
    # So that an image that is not looked at is noticed.
    fields = requests[0].images.fields
    blind = replace(requests[0], images=PromptImages((), {**fields, "pixel_values": -fields["pixel_values"]}))
    assert max(errors(model, blind, rollout).max() for rollout in groups[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_rollouts_are_those_of_the_weights_they_are_stamped_with(family, deterministic):
    model, requests = FAMILIES[family].model(), requests_of(family)
    versions = {0: FAMILIES[family].model(), 3: moved(model)}
    decoder = decoder_of(model, slots=7, kv_on_publish="recompute", deterministic=deterministic)
    encoded = Encoded(decoder)
    for request in requests:
        decoder.submit(request)
    groups = {}
    for step in range(100):
        if step == 3:
            load(model, versions[3])
            decoder.set_version(3)
        groups |= {group.request_id: group.rollouts for group in decoder.step()}
    stamps = set()
    for request in requests:
        for rollout in groups[request.request_id]:
            stamps.add(tuple(sorted(set(rollout.versions))))
            for version, clean in versions.items():
                error, stamped = errors(clean, request, rollout), torch.tensor(rollout.versions) == version
                assert error[stamped].numel() == 0 or error[stamped].max() < TOLERANCE
                assert error[~stamped].numel() == 0 or error[~stamped].max() > 20 * TOLERANCE
    assert stamps == {(0, 3), (3,)}
    if not deterministic:
        # Two prompts with images are under way at the publish, the third begins after it.
        assert encoded.times == 2 + 2 + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_cache_is_that_of_the_weights_before(family):
    """The tokens before a publish are those of the old weights; rollouts that begin after it, of the new ones."""
    model, requests = FAMILIES[family].model(), requests_of(family)
    versions = {0: FAMILIES[family].model(), 3: moved(model)}
    decoder = decoder_of(model, slots=7)
    for request in requests:
        decoder.submit(request)
    groups = {}
    for step in range(100):
        if step == 3:
            load(model, versions[3])
            decoder.set_version(3)
        groups |= {group.request_id: group.rollouts for group in decoder.step()}
    for request in requests:
        for rollout in groups[request.request_id]:
            of_first = rollout.versions.count(rollout.versions[0])
            assert errors(versions[rollout.versions[0]], request, rollout)[:of_first].max() < TOLERANCE


def turns_with_pictures(family: str, model, decoder: SlotDecoder, before=lambda turn: None):
    """Two rollouts, whose turns are followed by other numbers of pictures each, one of which begins with none. Yields
    the request of each turn, and what was sampled."""
    processor = FAMILIES[family].processor()
    begins = [replace(requests_of(family)[n], max_new_tokens=3 + n, num_rollouts=1, first_episode=n) for n in (0, 2)]
    shows = [
        [[picture(5, 12, 20)], [], [picture(6, 9, 9), picture(7, 12, 12)]],
        [[], [picture(8)], [picture(9, 12, 12)]],
    ]
    requests = begins
    for turn in range(4):
        before(turn)
        results = run(decoder, requests)
        turns = [(request, results[request.request_id][0]) for request in requests]
        yield from turns
        requests = []
        for (request, rollout), pictures in zip(turns, shows, strict=True):
            if turn == 3:
                return
            result = image_request(processor, 0, f"w{turn}", pictures[turn])
            known = (*request.prompt_ids, *rollout.token_ids)
            images = None if request.images is None else request.images.nothing_added()
            if result.images is not None:
                images = grown(images, result.images, len(known))
            ids = (*known, *result.prompt_ids)
            requests.append(
                replace(
                    request, request_id=request.request_id + 10, prompt_ids=ids, images=images,
                    first_position=request.first_position + len(ids) - len(request.prompt_ids),
                )
            )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_that_a_later_turn_adds_are_read_in_its_parked_slot(family):
    model = FAMILIES[family].model()
    decoder = decoder_of(model, length=60, max_prompt_tokens=190)
    encoded = Encoded(decoder)
    for request, rollout in turns_with_pictures(family, model, decoder):
        assert errors(model, request, rollout).max() < TOLERANCE
    assert (encoded.times, encoded.added) == (1, 4) and decoder.turns_prefilled_again == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lost", ["slot", "publish", "deterministic"])
def test_pictures_of_a_turn_whose_slot_is_gone_are_read_again(family, lost):
    model = FAMILIES[family].model()
    settings_of = {"kv_on_publish": "recompute"} if lost == "publish" else {"deterministic": lost == "deterministic"}
    decoder = decoder_of(model, length=60, max_prompt_tokens=190, **settings_of)

    def before(turn):
        if lost == "slot" and turn:
            run(decoder, [replace(requests_of(family)[3], request_id=1000 + turn, num_rollouts=5)])  # takes every slot
        if lost == "publish" and turn:
            load(model, moved(model))
            decoder.set_version(turn)

    for request, rollout in turns_with_pictures(family, model, decoder, before):
        assert errors(model, request, rollout).max() < TOLERANCE
    assert decoder.turns_prefilled_again == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_turn_goes_on_in_its_parked_slot_unless_its_images_are_others(family):
    processor, model = FAMILIES[family].processor(), FAMILIES[family].model()
    decoder = decoder_of(model, length=24)
    encoded = Encoded(decoder)
    first = replace(requests_of(family)[0], max_new_tokens=4, first_episode=10)
    begun = run(decoder, [first])[0]
    assert encoded.times == 1
    known = (*begun[1].token_ids, 30, 31)
    text = replace(turn_after(first, 1, known, request_id=7, tokens=5), images=first.images)
    (second,) = run(decoder, [text])[7]
    assert encoded.times == 1, "the slot was parked"
    assert errors(model, text, second).max() < TOLERANCE

    shown = image_request(processor, 8, "w9", [picture(5, 14, 30)])
    both = image_request(processor, 8, "w9", [picture(0), picture(5, 14, 30)]).images
    ids = (*text.prompt_ids, *second.token_ids, *shown.prompt_ids)
    for name in both.fields:
        if name.endswith("token_type_ids"):  # 1 where the tokens of an image are
            both.fields[name] = torch.isin(torch.tensor([ids]), torch.tensor([5, 7])).long()
    of_completion = len(ids) - len(first.prompt_ids)
    another = replace(text, request_id=8, prompt_ids=ids, images=both, first_position=of_completion)
    (third,) = run(decoder, [another])[8]
    assert encoded.times == 2, "nothing says that the other image is new"
    assert errors(model, another, third).max() < TOLERANCE


def test_images_stay_with_a_slot_that_is_moved_and_with_one_that_is_parked():
    """Qwen's positions are ahead of their places by another number in every slot."""
    model, requests = FAMILIES["qwen3_vl"].model(), requests_of("qwen3_vl")
    decoder = decoder_of(model, length=30, slots=3)
    wanted = [
        replace(request, max_new_tokens=3 + 5 * number, first_episode=number, num_rollouts=1)
        for number, request in enumerate([requests[2], requests[1], requests[0]])
    ]
    wanted = [replace(request, request_id=number, noise_key=number) for number, request in enumerate(wanted)]
    moves, move, ahead = [], decoder._move, decoder._slots.ahead
    decoder._move = lambda source, target: moves.append((ahead[source], ahead[target])) or move(source, target)
    groups = run(decoder, wanted)
    assert any(source != target for source, target in moves)
    for request in wanted:
        for rollout in groups[request.request_id]:
            assert errors(model, request, rollout).max() < TOLERANCE
    again = [
        turn_after(request, 0, (*groups[number][0].token_ids, 33), request_id=50 + number, tokens=4)
        for number, request in enumerate(wanted)
    ]
    turns = run(decoder, again)
    for request in again:
        assert errors(model, request, turns[request.request_id][0]).max() < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_in_a_process_with_a_publish(lora):
    """Two families whose positions and masks are their own; everything is trained, the vision tower too."""
    for family in ("qwen2_5_vl", "gemma3"):
        model = FAMILIES[family].model()
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        engine = started(model, 40, kv_on_publish="recompute")
        requests = requests_of(family)
        try:
            for round_, first in enumerate((0, 10)):
                asked = [replace(request, request_id=first + request.request_id) for request in requests]
                engine.submit(asked)
                events = events_of(engine, [request.request_id for request in asked])
                for request in asked:
                    event = events[request.request_id]
                    assert isinstance(event, GroupFinished)
                    for rollout in event.rollouts:
                        assert set(rollout.versions) == {round_}
                        if not {5, 7} & set(rollout.token_ids):
                            assert errors(model, request, rollout).max() < TOLERANCE
                train(model)
                engine.publish(collect_weights(model, 1, complete=False))
        finally:
            engine.close()


def test_fields_of_another_model_or_prompt_are_refused():
    model, (request, *_) = FAMILIES["gemma3"].model(), requests_of("qwen2_5_vl")
    decoder = decoder_of(model)
    with pytest.raises(ValueError, match=r"'image_grid_thw'.* which Gemma3ForConditionalGeneration does not take"):
        decoder.submit(request)
    (request, *_) = requests_of("gemma3")
    with pytest.raises(ValueError, match=r"token_type_ids has .* values for a prompt of 4 tokens"):
        decoder.submit(replace(request, prompt_ids=request.prompt_ids[:4]))
    assert decoder.idle and max(request.prompt_ids) < VOCAB
