"""Which settings of a run can be changed against what limits it, and what each change costs.

Guarantees: pure; a setting is named only where the run's settings and measurements leave room for it. What is not
known leaves room.
"""

import math
from dataclasses import dataclass

from trl_a3po.report.run_numbers import RunNumbers
from trl_a3po.report.run_settings import RunSettings

FOLLOWS = 0.2  # share of the time of sampling, from which it goes with the length of completions
NOTHING_LEFT = "No setting of this run is left to try"


@dataclass(frozen=True)
class Advice:
    """
    Args:
        setting: of `A3POConfig`.
        sentence: how to change it, and what that costs.
    """

    setting: str
    sentence: str


def known(*advice: Advice | None) -> list[Advice]:
    """Those that there are."""
    return [piece for piece in advice if piece is not None]


# --- the engine ------------------------------------------------------------------------------------------------------


def for_generation(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What makes sampling faster, and what to say if no setting does."""
    run = numbers.settings
    servers = run.engine == "vllm" and run.engine_slots is None
    advice = known(
        Advice("vllm_server_urls", "Add vLLM servers (vllm_server_urls), which need GPUs of their own.")
        if servers
        else _engine_device(run),
        _vllm(run),
        None if _length_is_nothing(numbers) else _shorter("Make completions shorter"),
    )
    why = [
        *(["there is no GPU to give to the engine"] if run.accelerators == 0 else []),
        *(["short completions take as long as long ones"] if _length_is_nothing(numbers) else []),
    ]
    return advice, f"{NOTHING_LEFT}{': ' if why else ''}{', and '.join(why)}. Make the engine itself faster."


def _is_ours(run: RunSettings) -> bool:
    return run.engine in ("transformers", "vllm")


def _engine_device(run: RunSettings) -> Advice | None:
    if not _is_ours(run) or (run.accelerators is not None and run.accelerators <= max(1, run.engine_devices)):
        return None
    devices = "more devices" if run.engine_devices else "devices of its own"
    return Advice("engine_device", f"Give the engine {devices} (engine_device), which then do not train.")


def _vllm(run: RunSettings) -> Advice | None:
    if run.engine != "transformers" or run.accelerators == 0:
        return None
    return Advice("engine", "Generate with engine='vllm', which has to be installed and holds more of a GPU's memory.")


def _shorter(what: str) -> Advice:
    return Advice("max_completion_length", f"{what} (max_completion_length), which cuts off longer answers.")


def _length_is_nothing(numbers: RunNumbers) -> bool:
    """Whether short completions take as long as long ones. The engines of this package decode token after token, so
    that their time goes with the length even where most of it is spent in line for a slot."""
    share = numbers.share_of_length
    return not _is_ours(numbers.settings) and share is not None and share < FOLLOWS


# --- training --------------------------------------------------------------------------------------------------------


def for_training(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What makes training faster, and what to say if no setting does."""
    run = numbers.settings
    advice = known(
        Advice(
            "per_device_train_batch_size",
            "Train larger micro-batches (per_device_train_batch_size, with fewer gradient_accumulation_steps), which "
            "need more memory.",
        )
        if run.gradient_accumulation_steps is None or run.gradient_accumulation_steps > 1
        else None,
        Advice("proximal_method", "proximal_method='loglinear' saves a forward pass, by an approximation.")
        if run.proximal_method == "recompute"
        else None,
        Advice(
            "gradient_checkpointing",
            "Do not compute activations twice (gradient_checkpointing=False), which needs memory for them.",
        )
        if run.gradient_checkpointing
        else None,
    )
    return advice, f"{NOTHING_LEFT}: it takes a faster device, more devices or a smaller model."


def cheaper_engine(numbers: RunNumbers) -> str:
    """What a run that waits for training can save."""
    if numbers.settings.engines == 1:
        return ""
    return f" Fewer than {numbers.settings.engines} engines would cost no time."


# --- the queue -------------------------------------------------------------------------------------------------------


def for_stragglers(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What keeps the trainer from waiting for a few slow groups, and what to say where nothing does."""
    older = _older(numbers.settings, "other groups are trained meanwhile")
    if numbers.slowest_phase == "scoring":
        limit = "Bound the time of a reward (reward_timeout, with reward_workers), which rejects slower groups."
        return known(Advice("reward_timeout", limit), older), ""
    long = numbers.stragglers_are_long is not False
    return known(older, _shorter("Bound their length") if long else None), ""


def for_more_ahead(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What lets the engine run further ahead of training."""
    return known(_older(numbers.settings, "the engine runs further ahead")), ""


def _older(run: RunSettings, effect: str) -> Advice:
    if run.schedule in ("sync", "periodic"):
        return Advice("schedule", f"With schedule='async', {effect}, and tokens get up to max_staleness steps old.")
    return Advice("max_staleness", f"Raise max_staleness: {effect}, and tokens get older.")


# --- rewards and publishing ------------------------------------------------------------------------------------------


def for_rewards(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What makes rewards faster."""
    workers = (
        "Score more groups at a time (reward_workers), in processes that each hold a copy of the functions' state, or "
        "make the reward functions faster."
    )
    return [Advice("reward_workers", workers)], ""


def for_publishing(numbers: RunNumbers) -> tuple[list[Advice], str]:
    """What makes publishing take less time, and what to say if no setting does."""
    run = numbers.settings
    advice = known(
        Advice("weight_sync_steps", "Publish less often (weight_sync_steps): tokens get older.")
        if _can_publish_less_often(run)
        else None,
        Advice("lora_sync", "Send smaller updates (lora_sync='adapter'): the engine then applies the adapter.")
        if run.lora_sync == "merged"
        else None,
    )
    rule = f"max_staleness={run.max_staleness} does not let weights be published less often"
    if run.schedule == "fixed_lag":
        rule = "schedule='fixed_lag' publishes at every batch"
    return advice, f"{NOTHING_LEFT}: {rule}."


def _can_publish_less_often(run: RunSettings) -> bool:
    """Whether a larger `weight_sync_steps` lets batches be filled within `max_staleness`."""
    if run.schedule == "fixed_lag":  # publishes at every batch
        return False
    larger = range(run.weight_sync_steps + 1, run.weight_sync_steps + run.steps_per_batch + run.max_staleness + 2)
    return any(steps - math.gcd(steps, run.steps_per_batch) <= run.max_staleness for steps in larger)
