"""Options of sampling that come from `generation_kwargs`, from the model's own generation configuration or from a
callback: followed, or refused with what to set."""

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, TrainerCallback

from tests.runs import COMPLETE, build, logged
from tests.test_still_works import SpecKeepingEngine
from tests.tiny import tiny_tokenizer
from trl_a3po.session.sampling import FOLLOWED, NEUTRAL, WITHOUT_EFFECT
from trl_a3po.testing import StubEngine, scripted_completion


def test_every_field_of_a_generation_config_has_one_place():
    named = [*FOLLOWED, *NEUTRAL, *WITHOUT_EFFECT]
    assert len(named) == len(set(named))
    fields = set(vars(GenerationConfig())) | set(GenerationConfig().to_dict())
    assert {name for name in fields if not name.startswith("_")} <= set(named)


def sampling_with(model, folder, **settings):
    engine = SpecKeepingEngine(COMPLETE)
    trainer = build(model, folder, engine=engine, max_steps=1, processing_class=tiny_tokenizer(), **settings)
    trainer.train()
    return engine.sampling


def test_generation_kwargs_that_change_nothing_are_accepted(model_path, tmp_path):
    kwargs = {"do_sample": True, "use_cache": True, "num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0}
    assert sampling_with(model_path, tmp_path, generation_kwargs=kwargs) == sampling_with(model_path, tmp_path)


def test_generation_kwargs_take_the_place_of_fields_as_in_grpo(model_path, tmp_path):
    kwargs = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "max_new_tokens": 8}
    kwargs |= {"temperature": 0.7, "stop_token_ids": [9, 1]}
    sampling = sampling_with(
        model_path, tmp_path, generation_kwargs=kwargs, temperature=0.7, top_k=3, max_completion_length=16
    )
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (5, 0.9, 0.1, 1.2)
    assert (sampling.max_new_tokens, sampling.temperature) == (8, 0.7)
    assert sampling.stop_token_ids == (1, 9)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"do_sample": False}, "do_sample=False, which the engine does not follow: set do_sample=True"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"no_repeat_ngram_size": 3}, "set no_repeat_ngram_size=0"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"stop": ["</answer>"]}, "stop=.*leave stop out"),
        ({"max_new_tokens": 9}, "set max_completion_length=9 in A3POConfig"),
        ({"temperature": 0.5}, "set temperature in A3POConfig"),
    ],
)
def test_other_generation_kwargs_are_refused_with_what_to_set(model_path, tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(model_path, tmp_path, generation_kwargs=kwargs)


def model_with(path, **options):
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model


def test_what_the_models_generation_config_adds_is_followed_as_in_generate(model_path, tmp_path):
    options = {"suppress_tokens": [7, 8], "min_new_tokens": 2, "min_p": 0.2, "temperature": 0.1, "do_sample": False}
    sampling = sampling_with(model_with(model_path, **options, cache_implementation="static"), tmp_path)
    assert (sampling.suppress_token_ids, sampling.min_new_tokens, sampling.min_p) == ((7, 8), 2, 0.2)
    assert sampling.temperature == 1.0  # GRPOConfig gives it


@pytest.mark.parametrize("option", [{"no_repeat_ngram_size": 3}, {"bad_words_ids": [[5]]}, {"guidance_scale": 1.5}])
def test_logits_processors_of_the_model_that_the_engine_lacks_are_refused(model_path, tmp_path, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"model.generation_config.{name} = None"):
        build(model_with(model_path, **option), tmp_path, processing_class=tiny_tokenizer())


class Anneal(TrainerCallback):
    def __init__(self, **options):
        self.options = options

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for name, value in self.options.items():
                setattr(self.trainer.generation_config, name, value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 2}, "max_new_tokens changed from 8 to 2 during training"),
        ({"top_k": 2}, "top_k changed from 0 to 2 during training"),
        ({"eos_token_id": [5]}, "eos_token_id changed from"),
        ({"temperature": 0.1}, "temperature=0.1"),
        ({"num_beams": 2}, "num_beams=2"),
    ],
)
def test_a_generation_config_that_a_callback_changes_ends_the_run(model_path, tmp_path, options, message):
    callback = Anneal(**options)
    trainer = callback.trainer = build(model_path, tmp_path, callbacks=[callback])
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_generation_config_that_is_changed_before_training_is_followed(model_path, tmp_path):
    engine = SpecKeepingEngine(scripted_completion(64, 4))
    trainer = build(model_path, tmp_path, engine=engine, max_steps=1)
    trainer.generation_config.max_new_tokens = 4
    trainer.train()
    assert engine.sampling.max_new_tokens == 4


def test_a_temperature_that_only_one_side_follows_is_refused(model_path, tmp_path):
    trainer = build(model_path, tmp_path, engine=StubEngine(COMPLETE))
    trainer.args.temperature = 0.5
    with pytest.raises(ValueError, match=r"args.temperature was changed from 1.0 to 0.5"):
        trainer.train()
    assert not logged(trainer, "loss")
