"""The kept rollouts of a run, packed for the sample browser of the page.

Guarantees: the packed text has about `MOST_CHARACTERS` at the most, whatever the run: where the rollouts of a run have
more, a subset is packed that is spread evenly over the run, and the page says how many were left out. Tokens that are
not packed are counted.
"""

import base64
import gzip
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from trl_a3po.report.html.reported_run import Lines

MOST_CHARACTERS = 60_000_000
MOST_PROMPT_CHARACTERS = 4000


def packed_samples(rollouts: Lines, most_characters: int = MOST_CHARACTERS) -> str | None:
    """The rollouts as base64 of gzip of JSON; `None` if there are none.

    The JSON has one list for each fact: numbers and texts with one entry for each rollout, and `prompts`, the texts to
    which `prompt_text` points. Values of tokens are one text for each rollout: `cuts` are the lengths of the texts of
    the tokens in UTF-16 units, as JavaScript counts; `versions` are `VERSIONxCOUNT`; `ratios` (policy minus behavior
    log-prob), `weights` and `entropies` are hundredths.
    """
    if not rollouts:
        return None
    shown = rollouts[:: _stride(rollouts, most_characters)]
    columns = {"kept": len(rollouts), **_columns(shown)}
    text = json.dumps(columns, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)).decode()


def _stride(rollouts: Lines, most: int) -> int:
    """Every how many-th rollout is shown, by the size of a few hundred of them."""
    few = rollouts[:: max(1, len(rollouts) // 300)]
    size = len(json.dumps(_columns(few), ensure_ascii=False)) / len(few)
    return max(1, math.ceil(size * len(rollouts) / most))


def _columns(rollouts: Lines) -> dict[str, Any]:
    texts = {rollout["prompt_text"]: None for rollout in rollouts}
    places = {text: place for place, text in enumerate(texts)}
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout["rewards"]))
    columns: dict[str, Any] = {
        "prompts": [text[-MOST_PROMPT_CHARACTERS:] for text in texts],
        "prompt_text": [places[rollout["prompt_text"]] for rollout in rollouts],
        "reward_names": names,
        "rewards": [[rollout["rewards"].get(name) for rollout in rollouts] for name in names],
    }
    for name in ("version", "prompt", "rollout", "length", "advantage", "finish_reason"):
        columns[name] = [rollout.get(name) for rollout in rollouts]
    for name, column in OF_TOKENS.items():
        columns[name] = list(map(column, rollouts))
    return columns


def _staleness(rollout: dict[str, Any]) -> float:
    sampled = [version for version in rollout["versions"] if version >= 0]
    return round(rollout["version"] - sum(sampled) / len(sampled), 2) if sampled else 0.0


def _ratios(rollout: dict[str, Any]) -> list[float | None]:
    pairs = zip(rollout.get("policy_logps", ()), rollout["behavior_logps"], strict=False)
    return [None if policy is None else policy - behavior for policy, behavior in pairs]


def _runs(versions: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return ",".join(f"{version}x{count}" for version, count in runs)


def _hundredths(values: Sequence[float | None]) -> str:
    return ",".join("" if value is None else str(round(100 * value)) for value in values)


def _lengths(rollout: dict[str, Any]) -> str:
    return ",".join(str(len(token.encode("utf-16-le", "surrogatepass")) // 2) for token in rollout["tokens"])


OF_TOKENS: dict[str, Callable[[dict[str, Any]], float | str]] = {
    "staleness": _staleness,
    "texts": lambda rollout: "".join(rollout["tokens"]),
    "cuts": _lengths,
    "versions": lambda rollout: _runs(rollout["versions"]),
    "ratios": lambda rollout: _hundredths(_ratios(rollout)),
    "weights": lambda rollout: _hundredths(rollout.get("weights", ())),
    "entropies": lambda rollout: _hundredths(rollout.get("entropies", ())),
}
"""Column -> its value for a rollout."""
