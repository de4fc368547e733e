"""Continuous batching inside one process, on the forward of a Hugging Face model: no threads, no I/O, no clock.

Guarantees:
- every submitted request ends once: either `step` returns it with all its rollouts, or it is cancelled;
- a token's version is that of the weights which produced its logits: they are sampled in the step that computes them;
- the noise of a token is a function of (seed, noise_key, rollout number, position) and of nothing else;
- a freed slot is refilled before the next decode step, in submission order (request, then rollout number), later
  turns of episodes before prompts that have not begun;
- a later turn computes only its new tokens if the slot of the turn before it is still parked (`parked.py`). What it
  samples is what a prefill of the whole would sample, but for keys and values kept across a publish (`kv_on_publish`).

On a GPU the host reads the tokens of a decode step while the device computes the next one. So a slot whose sequence
ended with a stop token is refilled one step later, and the token that the device draws in between is thrown away.

A prompt is prefilled once per group, and so its images are encoded once per group and version (once per rollout where
`deterministic` recomputes). Images that a later turn adds are encoded once per rollout, as long as its slot is parked
between the turns. When only some of a group's rollouts find a free slot, the prompt's keys, values
and logits are kept for the others, until the weights change: then it is prefilled again, so that a rollout always
starts under the current weights.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, cast

import numpy as np
import torch

from trl_a3po.engines.requests import added_images, check_request, check_scored, longest_prompt
from trl_a3po.engines.transformers.cache import PrefillCache, SlotCache
from trl_a3po.engines.transformers.decode_step import DecodeStep, DecodeSteps, cuda_graphs
from trl_a3po.engines.transformers.draws import Draw
from trl_a3po.engines.transformers.forward import ModelForward
from trl_a3po.engines.transformers.parked import ParkedSlots
from trl_a3po.engines.transformers.sampling import Sampler, noise_stream
from trl_a3po.engines.transformers.sequences import DecodedGroup, DecodedRollout, Prefilled, prefill_batches
from trl_a3po.engines.transformers.slots import Slots
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Rollout

# On a CPU the last rows of a batch go through other instructions unless their number is a multiple of this one.
_DETERMINISTIC_ROWS = 8


class SlotDecoder:
    """Samples groups of completions from `model`, `slots` rollouts at a time.

    Args:
        model: a causal language model of transformers, or a `PeftModel` around one, already on its device and in the
            dtype to sample with. It is put in eval mode; its weights may be changed in place between calls of `step`,
            followed by `set_version`.
        sampling: the same for every request.
        slots: rollouts decoded at the same time.
        max_prompt_tokens: longest prompt accepted; `None`: whatever the model's context leaves beside
            `max_new_tokens`. Needed with `deterministic`, which pads to it.
        kv_on_publish: what `set_version` does to sequences in flight, and to parked slots: "keep" their cache, or
            "recompute" it under the new weights before their next token.
        deterministic: tokens and log-probs are bit-equal whatever else is in the batch (one machine, one thread
            count, one number of slots), for the price of padding: `slots` to a multiple of 8, every prompt to
            `max_prompt_tokens`, the cache to that plus `max_new_tokens`; no slot is parked. Otherwise log-probs
            agree to 1e-4 in fp32.
        version: policy version of the weights in `model`.
        device: where the model lives; `None`: the device of its embeddings.

    Raises:
        ValueError: a sampling setting that cannot hold, or an architecture whose cache is not one key and one value
            per position and layer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: SamplingSettings,
        *,
        slots: int,
        max_prompt_tokens: int | None = None,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        version: int = 0,
        device: torch.device | str | None = None,
    ):
        if slots < 1:
            raise ValueError(f"slots={slots} leaves no room for a rollout: it must be at least 1.")
        if kv_on_publish not in ("keep", "recompute"):
            raise ValueError(f"kv_on_publish={kv_on_publish!r} is unknown: set 'keep' or 'recompute'.")
        if deterministic and max_prompt_tokens is None:
            raise ValueError(
                "deterministic=True pads every prompt to the same length, so max_prompt_tokens=None cannot hold: set "
                "it to the longest prompt of the run."
            )
        self._forward = ModelForward(model, device=device, deterministic=deterministic)
        self._device = self._forward.device
        self._sampling = sampling
        self._sampler = Sampler(sampling, self._forward.vocab_size, self._device)
        self._max_prompt_tokens = longest_prompt(
            max_prompt_tokens, new_tokens=sampling.max_new_tokens, context=self._forward.context
        )
        self._recompute_on_publish = kv_on_publish == "recompute"
        # The one padded length of deterministic mode: every sequence fits.
        self._fixed_length: int | None = None
        if deterministic and max_prompt_tokens is not None:
            self._fixed_length = max_prompt_tokens + sampling.max_new_tokens

        rows = -(-slots // _DETERMINISTIC_ROWS) * _DETERMINISTIC_ROWS if deterministic else slots
        self._version = version
        self._tokens = 0
        self._turns_prefilled_again = 0
        self._cache_is_stale = False
        self._groups: dict[int, DecodedGroup] = {}
        self._waiting: deque[DecodedGroup] = deque()
        # Slot i decodes self._active[i]; cache and slots have more rows than that in deterministic mode.
        self._active: list[DecodedRollout | None] = [None] * slots
        self._parked = ParkedSlots()  # some of the slots in which `_active` has nothing
        self._cache = SlotCache(rows)
        seen = self._forward.vocab_size if self._sampler.needs_seen else None
        self._slots = Slots(rows, seen=seen, device=self._device)
        on_gpu = self._device.type == "cuda"
        self._steps = DecodeSteps(
            DecodeStep(self._forward, self._sampler, self._cache, self._slots),
            self._cache,
            slots=rows,
            whole_capacity=partial(self._forward.reads_whole_capacity, self._cache),
            capture=cuda_graphs(self._device) if on_gpu else None,
        )
        # Draws that stay unread while the device goes on: it must not wait for the host.
        self._ahead = 1 if on_gpu else 0
        self._draws: deque[Draw] = deque()

    @property
    def version(self) -> int:
        """Policy version of the weights in `model`."""
        return self._version

    @property
    def idle(self) -> bool:
        """Nothing is waiting and nothing is being decoded: `step` would do nothing."""
        return not self._groups

    @property
    def active_rollouts(self) -> int:
        """Rollouts that hold a slot."""
        return sum(rollout is not None for rollout in self._active)

    @property
    def waiting_requests(self) -> int:
        """Requests none of whose rollouts has started."""
        return sum(group.started == 0 for group in self._waiting)

    @property
    def tokens(self) -> int:
        """Completion tokens sampled so far, those of cancelled requests included."""
        return self._tokens

    @property
    def turns_prefilled_again(self) -> int:
        """Later turns that began without a parked slot."""
        return self._turns_prefilled_again

    def submit(self, request: GroupRequest) -> None:
        """Queue a request; costs no forward.

        Raises:
            ValueError: the prompt is empty, holds an id outside the vocabulary or does not fit, the id is in use, or
                `num_rollouts` is below 1.
        """
        if request.request_id in self._groups:
            raise ValueError(
                f"Request {request.request_id} is already being sampled: every attempt needs a new request_id."
            )
        context = self._forward.context
        check_request(
            request,
            self._sampling,
            vocab_size=self._forward.vocab_size,
            max_prompt_tokens=self._max_prompt_tokens,
            room=f" in the model's context of {context}" if context else "",
        )
        if request.images is not None:
            self._forward.image_inputs.check(request.images, len(request.prompt_ids))
        group = DecodedGroup(request, request.settings(self._sampling))
        self._groups[request.request_id] = group
        # Later turns go before prompts that have not begun, in the order in which they came.
        later_turns = sum(waiting.request.first_position > 0 for waiting in self._waiting)
        self._waiting.insert(later_turns if request.first_position else len(self._waiting), group)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forget these requests and free their slots; unknown ids are ignored."""
        cancelled = {id(group) for group in (self._groups.pop(key, None) for key in set(request_ids)) if group}
        if cancelled:
            self._waiting = deque(group for group in self._waiting if id(group) not in cancelled)
            for rollout in self._active:
                if rollout is not None and id(rollout.group) in cancelled:
                    self._free(rollout)

    def end_episodes(self, episodes: Iterable[int]) -> None:
        """Keep nothing for later turns of these episodes; unknown ones are ignored."""
        self._parked.drop(episodes)

    def set_version(self, version: int) -> None:
        """Say that the weights of `model` were changed in place and are now those of `version`.

        Raises:
            ValueError: `version` is negative, or older than that of sequences in flight.
        """
        if version < 0:
            raise ValueError(f"version={version} is not a policy version: it must be 0 or more.")
        if version < self._version and self.active_rollouts:
            raise ValueError(
                f"version={version} is older than {self._version}, under which {self.active_rollouts} rollouts in "
                "flight are sampled: publish versions in order, or cancel those rollouts first."
            )
        if self._recompute_on_publish or version <= self._version:
            self._parked.clear()
        self._version = version
        self._cache_is_stale = self._recompute_on_publish
        for group in self._waiting:
            group.prefilled = None

    @torch.inference_mode()
    def step(self) -> list[GroupFinished]:
        """Give free slots to waiting rollouts (prefill and their first token), then sample one token of every active
        rollout. Returns the groups whose last rollout finished; `[]` when idle.

        Raises:
            EngineError: the model's logits are NaN or infinite.
        """
        finished: list[GroupFinished] = []
        if self._cache_is_stale:
            self._read_draws(finished, ahead=0)
            self._recompute()
            self._cache_is_stale = False
        while self._waiting and None in self._active:
            self._admit()
            if not self._ahead:
                self._read_draws(finished, ahead=0)
        decoding = self.active_rollouts > 0
        if decoding:
            self._decode()
        self._read_draws(finished, ahead=self._ahead if decoding else 0)
        return finished

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Log-probs of known tokens under the weights in `model`, as those of sampled tokens are defined, from a
        forward of its own.

        Raises:
            ValueError: no tokens, ids outside the vocabulary, or more tokens than the model's context.
        """
        forward = self._forward
        check_scored(prompt_ids, completion_ids, vocab_size=forward.vocab_size, context=forward.context)
        logits = forward.completion_logits(prompt_ids, completion_ids).float()
        tokens = torch.tensor(completion_ids, device=self._device)[:, None]
        return (logits / self._sampling.temperature).log_softmax(1).gather(1, tokens)[:, 0].tolist()

    def _admit(self) -> None:
        """Fill the free slots: extend parked slots, prefill the prompts that need it, and sample every new rollout's
        first token."""
        continued = self._next_continued()
        self._occupy(continued)
        begun = self._next_begun()
        self._occupy(begun)
        groups = list({id(rollout.group): rollout.group for _, rollout in begun}.values())
        self._prefill([group for group in groups if group.prefilled is None])
        self._copy_prompts(begun)
        logits = [*self._continue(continued), *(rollout.group.prompt.logits for _, rollout in begun)]
        starts = [rollout for _, rollout in (*continued, *begun)]
        self._drawn(starts, self._sample_starts(starts, torch.stack(logits)))
        for group in groups:
            group.release_prefill()

    def _next_continued(self) -> list[tuple[int, DecodedRollout]]:
        """The later turns that wait and whose slots are parked."""
        starts: list[tuple[int, DecodedRollout]] = []
        for group in self._waiting:
            if not group.request.first_position:  # nor does any behind it
                break
            while not group.all_started and (start := self._parked.take(group)) is not None:
                starts.append(start)
        self._waiting = deque(group for group in self._waiting if not group.all_started)
        return starts

    def _next_begun(self) -> list[tuple[int, DecodedRollout]]:
        """Free slots, parked ones last, and the rollouts that are next in line for them."""
        not_active = [slot for slot, rollout in enumerate(self._active) if rollout is None]
        free = deque(slot for slot in not_active if slot not in self._parked)
        starts: list[tuple[int, DecodedRollout]] = []
        for _ in not_active:
            if not self._waiting:
                break
            group = self._waiting[0]
            starts.append((free.popleft() if free else self._parked.evict(), group.start_next()))
            self._turns_prefilled_again += group.request.first_position > 0
            if group.all_started:
                self._waiting.popleft()
        return starts

    def _continue(self, starts: Sequence[tuple[int, DecodedRollout]]) -> list[torch.Tensor]:
        """Compute what later turns add to the slots that were parked for them: the logits `(V,)` after the last of
        each."""
        texts = [start for start in starts if not added_images(start[1].group.request)]
        new = [(slot, rollout.kept, rollout.group.request.prompt_ids[rollout.kept :]) for slot, rollout in texts]
        logits = {slot: row for (slot, _), row in zip(texts, self._extend(new), strict=True)}
        for slot, rollout in starts:
            if slot not in logits:
                request = rollout.group.request
                images = cast(PromptImages, request.images)
                extended = self._forward.extend_images(request.prompt_ids, images, self._cache, slot, rollout.kept)
                logits[slot], self._slots.ahead[slot] = extended
        return [logits[slot] for slot, _ in starts]

    def _extend(self, new: Sequence[tuple[int, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Compute new tokens, given as slot, place of the first, and the tokens. Returns the logits `(V,)` after the
        last of each."""
        logits: dict[int, torch.Tensor] = {}
        for batch, pad_to in prefill_batches([len(tokens) for _, _, tokens in new]):
            slots, places, tokens = zip(*(new[i] for i in batch), strict=True)
            ahead = self._slots.ahead[list(slots)].tolist()
            rows = self._forward.extend(tokens, pad_to, self._cache, slots, places, ahead)
            logits |= dict(zip(batch, rows, strict=True))
        return [logits[i] for i in range(len(new))]

    def _prefill(self, groups: Sequence[DecodedGroup]) -> None:
        """Compute the logits, keys and values of the groups' prompts."""
        texts = [group for group in groups if group.request.images is None]
        prompts = [group.request.prompt_ids for group in texts]
        for batch, pad_to in self._batches([len(prompt) for prompt in prompts], self._max_prompt_tokens):
            logits, cache = self._forward.prefill([prompts[i] for i in batch], pad_to)
            for row, i in enumerate(batch):
                texts[i].prefilled = Prefilled(logits[row], cache, row)
        for group in groups:
            if (images := group.request.images) is not None:
                prompt = group.request.prompt_ids
                pad_to = self._padded_length(len(prompt), self._max_prompt_tokens)
                group.prefilled = Prefilled(*self._forward.prefill_images(prompt, images, pad_to))

    def _occupy(self, starts: Sequence[tuple[int, DecodedRollout]]) -> None:
        for slot, rollout in starts:
            request = rollout.group.request
            self._active[slot], rollout.slot = rollout, slot
            stream = noise_stream(self._sampling.seed, request.noise_key, rollout.number)
            self._slots.occupy(slot, request.prompt_ids, stream, request.first_position)

    def _copy_prompts(self, starts: Sequence[tuple[int, DecodedRollout]]) -> None:
        by_cache: dict[int, list[tuple[int, Prefilled]]] = {}
        for slot, rollout in starts:
            prefilled = rollout.group.prompt
            self._slots.ahead[slot] = prefilled.ahead
            by_cache.setdefault(id(prefilled.cache), []).append((slot, prefilled))
        for copies in by_cache.values():
            rows = [prefilled.row for _, prefilled in copies]
            self._write([slot for slot, _ in copies], copies[0][1].cache, rows)

    def _sample_starts(self, starts: Sequence[DecodedRollout], logits: torch.Tensor) -> torch.Tensor:
        """The first tokens and their log-probs, `(2, N)`."""
        slots = np.array([rollout.slot for rollout in starts])
        if self._fixed_length is None:
            drawn = self._sample(logits, slots)
        else:
            every_slot = logits.new_zeros(len(self._slots), logits.shape[1])
            every_slot[torch.from_numpy(slots).to(self._device)] = logits
            drawn = self._sample(every_slot, np.arange(len(self._slots)))[:, slots]
        self._slots.take(slots, drawn[0].long())
        return drawn

    def _sample(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        too_early = self._sampler.too_early(self._slots.generated(slots))
        return self._sampler.draw(logits, self._slots.noise(slots), too_early, self._slots.seen(slots))

    def _decode(self) -> None:
        """Have the next token of every active rollout drawn."""
        needed = self._close_gaps()
        rows = self._steps.rows(needed) if self._fixed_length is None else len(self._slots)
        active = [rollout for rollout in self._active if rollout is not None]
        slots = self._slots
        slots.rest([slot for slot in range(rows) if not self._holds_a_sequence(slot)])
        slots.send()
        drawn = self._steps.run(rows, self._fixed_length or int(slots.place[:rows].max()) + 1)
        columns = [rollout.slot for rollout in active]
        self._drawn(active, drawn if len(columns) == rows else drawn[:, slots.on_device(np.array(columns))])

    def _close_gaps(self) -> int:
        """Move the last sequences into free slots, if fewer rows are decoded then. Returns how many are needed."""
        active = self.active_rollouts
        last = max(slot for slot, rollout in enumerate(self._active) if rollout is not None)
        if self._fixed_length is not None or self._steps.rows(active) == self._steps.rows(last + 1):
            return last + 1
        for free in range(active):
            if self._active[free] is None:
                self._move(next(slot for slot in range(last, -1, -1) if self._active[slot] is not None), free)
        return active

    def _move(self, source: int, target: int) -> None:
        rollout, slots = self._active[source], self._slots
        assert rollout is not None, "only a sequence is moved"
        if target in self._parked:
            self._cache.swap(source, target, int(slots.place[[source, target]].max()))
            self._parked.move(target, source)
            place, ahead = slots.place[target], slots.ahead[target]
            slots.move(source, target)
            slots.place[source], slots.ahead[source] = place, ahead
        else:
            self._cache.move(source, target, int(slots.place[source]))
            slots.move(source, target)
        self._active[source], self._active[target], rollout.slot = None, rollout, target

    def _drawn(self, rollouts: Sequence[DecodedRollout], drawn: torch.Tensor) -> None:
        """One token of each of these rollouts, whose slots it frees if it is known to be the last, is in `drawn`
        `(2, N)`."""
        self._draws.append(Draw.of(rollouts, self._version, drawn))
        self._slots.advance(np.array([rollout.slot for rollout in rollouts]))
        for rollout in rollouts:
            rollout.drawn += 1
            if rollout.drawn == rollout.group.sampling.max_new_tokens:
                self._leave(rollout)

    def _leave(self, rollout: DecodedRollout) -> None:
        """The last token of the rollout is drawn: its slot is free, and keeps what it holds as long as it can."""
        slot = rollout.slot
        self._free(rollout)
        if slot is not None and self._fixed_length is None:
            self._parked.park(slot, rollout)

    def _holds_a_sequence(self, slot: int) -> bool:
        return slot < len(self._active) and (self._active[slot] is not None or slot in self._parked)

    def _free(self, rollout: DecodedRollout) -> None:
        if rollout.slot is not None:
            self._active[rollout.slot], rollout.slot = None, None

    def _read_draws(self, finished: list[GroupFinished], ahead: int) -> None:
        """Append the tokens of all draws but the last `ahead` to their rollouts."""
        while len(self._draws) > ahead:
            draw = self._draws.popleft()
            drawn = draw.read()
            if not np.isfinite(drawn).all():
                raise EngineError(
                    f"The model's logits are NaN or infinite under version {draw.version}: the published weights "
                    "are broken, or they overflow in the engine's dtype."
                )
            tokens = drawn[0].astype(np.int64)
            for rollout, token, logp in zip(draw.rollouts, tokens.tolist(), drawn[1].tolist(), strict=True):
                if self._in_flight(rollout):
                    self._append(rollout, token, logp, draw.version, finished)

    def _in_flight(self, rollout: DecodedRollout) -> bool:
        """Neither finished nor cancelled."""
        group = rollout.group
        return self._groups.get(group.request.request_id) is group and rollout.number not in group.done

    def _append(
        self, rollout: DecodedRollout, token: int, logp: float, version: int, finished: list[GroupFinished]
    ) -> None:
        self._tokens += 1
        rollout.append(token, logp, version)
        sampling = rollout.group.sampling
        stops = token in sampling.stop_token_ids
        if stops or len(rollout.token_ids) == sampling.max_new_tokens:
            self._leave(rollout)
            self._finish(rollout, "stop" if stops else "length", finished)

    def _finish(
        self, rollout: DecodedRollout, reason: Literal["stop", "length"], finished: list[GroupFinished]
    ) -> None:
        group = rollout.group
        group.done[rollout.number] = Rollout(rollout.token_ids, rollout.logps, rollout.versions, reason)
        if (whole := group.finished()) is not None:
            del self._groups[group.request.request_id]
            finished.append(whole)

    def _recompute(self) -> None:
        """Prefill every rollout in flight again: its prompt and its tokens but the last, which is decoded next."""
        every = [(slot, rollout) for slot, rollout in enumerate(self._active) if rollout is not None]
        self._recompute_with_images([start for start in every if start[1].group.request.images is not None])
        in_flight = [start for start in every if start[1].group.request.images is None]
        texts = [(*rollout.group.request.prompt_ids, *rollout.token_ids[:-1]) for _, rollout in in_flight]
        for batch, pad_to in self._batches([len(text) for text in texts], self._fixed_length):
            cache = self._forward.prefill_cache([texts[i] for i in batch], pad_to)
            self._write([in_flight[i][0] for i in batch], cache, range(len(batch)))

    def _recompute_with_images(self, in_flight: Sequence[tuple[int, DecodedRollout]]) -> None:
        """Encode the images of each group once, and put what its rollouts have sampled behind them."""
        if self._fixed_length is not None:
            for slot, rollout in in_flight:
                tokens, images = rollout.group.request.prompt_ids, cast(PromptImages, rollout.group.request.images)
                whole = (*tokens, *rollout.token_ids[:-1])
                _, cache, _, _ = self._forward.prefill_images(whole, images, self._fixed_length)
                self._write([slot], cache, [0])
            return
        groups = list({id(rollout.group): rollout.group for _, rollout in in_flight}.values())
        self._prefill(groups)
        self._copy_prompts(in_flight)
        for group in groups:
            group.release_prefill()
        sampled = [(slot, rollout.group.request.prompt_ids, rollout.token_ids[:-1]) for slot, rollout in in_flight]
        self._extend([(slot, len(prompt), tokens) for slot, prompt, tokens in sampled if tokens])

    def _write(self, slots: Sequence[int], cache: PrefillCache, rows: Sequence[int]) -> None:
        targets, sources = self._slots.on_device(np.array([slots, rows]))
        self._cache.write(targets, cache, sources, self._fixed_length or cache.length + 1)

    def _batches(self, lengths: Sequence[int], fixed: int | None) -> Iterable[tuple[list[int], int]]:
        """Indices of the sequences to prefill together and the length to pad them to: one at a time at the length
        `fixed` in deterministic mode, otherwise those of similar length."""
        if self._fixed_length is not None:
            return [([i], self._padded_length(length, fixed)) for i, length in enumerate(lengths)]
        return prefill_batches(lengths)

    def _padded_length(self, length: int, fixed: int | None) -> int:
        """What a sequence that is prefilled by itself is padded to."""
        if self._fixed_length is None:
            return length
        usual = cast(int, fixed)  # a later turn continues more than a prompt
        return usual if length <= usual else self._fixed_length
