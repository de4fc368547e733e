"""The settings of a run that decide what limits it and what can be changed, from the first line of its timeline.

Guarantees: pure; what the line does not say is `None`, or the value that a run has by itself.
"""

import math
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class RunSettings:
    """
    Args:
        groups_per_batch, num_generations, max_staleness, schedule, engine, engine_slots, reward_workers: of the
            `A3POConfig`; `engine_slots` is `None` where only the engine knows.
        weight_sync_steps, lora_sync, gradient_accumulation_steps, gradient_checkpointing, proximal_method: too.
        steps_per_batch: K, the optimizer steps for which a generation batch is used.
        accelerators: GPUs that the main process sees, 0 if it trains on a CPU.
        engines: how many engines generate.
        engine_devices: how many devices `engine_device` names; 0 if the engine shares the trainer's.
    """

    groups_per_batch: int
    num_generations: int
    max_staleness: int
    schedule: str = "async"
    engine: str = "transformers"
    engine_slots: int | None = None
    reward_workers: int = 0
    weight_sync_steps: int = 1
    lora_sync: str | None = None
    gradient_accumulation_steps: int | None = None
    gradient_checkpointing: bool | None = None
    proximal_method: str | None = None
    steps_per_batch: int = 1
    accelerators: int | None = None
    engines: int = 1
    engine_devices: int = 0

    @classmethod
    def of_start(cls, start: dict[str, Any]) -> Self:
        """The settings that the line `start` holds."""
        settings, rules = start.get("settings", {}), start.get("rules", {})
        devices = settings.get("engine_device")
        return cls(
            groups_per_batch=start["groups_per_batch"],
            num_generations=start["num_generations"],
            max_staleness=start["max_staleness"],
            schedule=start["schedule"],
            engine=settings.get("engine", "transformers"),
            engine_slots=start.get("engine_slots"),
            reward_workers=settings.get("reward_workers", 0),
            weight_sync_steps=settings.get("weight_sync_steps", 1),
            lora_sync=settings.get("lora_sync"),
            gradient_accumulation_steps=settings.get("gradient_accumulation_steps"),
            gradient_checkpointing=settings.get("gradient_checkpointing"),
            proximal_method=settings.get("proximal_method"),
            steps_per_batch=_steps_per_batch(rules) if rules else 1,
            accelerators=start.get("accelerators", 0 if settings.get("use_cpu") else None),
            engines=start.get("devices", {}).get("engines", 1),
            engine_devices=1 if isinstance(devices, str) else len(devices or ()),
        )


def _steps_per_batch(rules: dict[str, int]) -> int:
    micro_steps = rules["micro_steps_per_take"] * rules["takes_per_generation"]
    return max(1, math.ceil(micro_steps / rules["micro_steps_per_step"]))
