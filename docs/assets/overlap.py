"""Draws the picture of the README: the same work done in turn and done at the same time.

    python docs/assets/overlap.py

A small simulation: generating a batch takes 3 units of time and training on it 2.2. Colours are policy versions, so a
batch that was under way when new weights arrived has two of them. Writes `overlap_light.svg` and `overlap_dark.svg`.
"""

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

GENERATE, TRAIN = 3.0, 2.2
END = 20.8  # of the time axis: four steps in turn
LEFT, UNIT, WIDTH, HEIGHT = 118.0, 38.0, 930, 388
LANE, GAP = 34, 8
VERSIONS = ["#4c6fff", "#0a9b81", "#c2691c", "#a546c9", "#c43b5e", "#5c7a1f", "#2b86b8"]
THEMES = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "idle": "#d1d9e0", "card": "#f6f8fa"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "idle": "#3d444d", "card": "#151b23"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Bar:
    """A piece of work: its lane, its time, and the version of each part of it as `(share, version)`."""

    lane: str
    start: float
    end: float
    parts: tuple[tuple[float, int], ...]
    label: str


def in_turn() -> list[Bar]:
    bars, now = [], 0.0
    for step in range(4):
        bars.append(Bar("engine", now, now + GENERATE, ((1.0, step),), f"batch {step + 1}"))
        bars.append(Bar("trainer", now + GENERATE, now + GENERATE + TRAIN, ((1.0, step),), f"step {step + 1}"))
        now += GENERATE + TRAIN
    return bars


def overlapped() -> list[Bar]:
    """Batch `k` is generated while the steps before it are trained; each step publishes its weights at its end."""
    bars: list[Bar] = []
    published = [0.0]  # when each version arrived at the engine
    trained_until = 0.0
    for step in range(7):
        start, end = step * GENERATE, (step + 1) * GENERATE
        cuts = [start, *(moment for moment in published if start < moment < end), end]
        parts = tuple(
            ((after - before) / GENERATE, max(v for v, moment in enumerate(published) if moment <= before))
            for before, after in pairwise(cuts)
        )
        bars.append(Bar("engine", start, end, parts, f"batch {step + 1}"))
        begun = max(end, trained_until)
        trained_until = begun + TRAIN
        published.append(trained_until)
        bars.append(Bar("trainer", begun, trained_until, parts, f"step {step + 1}"))
    return bars


def picture(theme: dict[str, str]) -> str:
    turn, overlap = in_turn(), overlapped()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{FONT}" role="img" aria-label="Generation and training in turn, and at the same time">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{theme["card"]}"/>',
        *panel(theme, 20, "GRPOTrainer", f"generation and training take turns: {finished(turn)} steps", turn),
        *panel(theme, 158, "A3POTrainer", f"they overlap: {finished(overlap)} steps in the same time", overlap),
        *legend(theme, 302),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def finished(bars: list[Bar]) -> int:
    return sum(bar.lane == "trainer" and bar.end <= END + 1e-6 for bar in bars)


def panel(theme: dict[str, str], top: float, name: str, says: str, bars: list[Bar]) -> list[str]:
    written = [text(24, top + 18, name, theme["ink"], 16, weight=600), text(136, top + 18, says, theme["soft"], 14)]
    for number, lane in enumerate(("engine", "trainer")):
        y = top + 34 + number * (LANE + GAP)
        written.append(text(24, y + 22, {"engine": "generation", "trainer": "training"}[lane], theme["ink"], 13.5))
        middle, right = y + LANE / 2, LEFT + END * UNIT
        written.append(
            f'<line x1="{LEFT}" y1="{middle}" x2="{right:.1f}" y2="{middle}" stroke="{theme["idle"]}" '
            'stroke-width="2" stroke-dasharray="2 5"/>'
        )
        for bar in bars:
            if bar.lane == lane and bar.start < END - 1e-6:
                written += drawn(bar, y)
    return written


def drawn(bar: Bar, y: float) -> list[str]:
    """The bar, in the colours of its tokens' versions, cut off at the end of the axis."""
    written, at = [], bar.start
    for share, version in bar.parts:
        until = min(at + share * (bar.end - bar.start), END)
        if until > at:
            x, width = LEFT + at * UNIT + 1, (until - at) * UNIT - (0.0 if until < bar.end - 1e-6 else 2)
            written.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{VERSIONS[version]}"/>'
            )
        at += share * (bar.end - bar.start)
    if bar.end <= END + 1e-6:
        middle = LEFT + (bar.start + bar.end) / 2 * UNIT
        written.append(text(middle, y + 22, bar.label, "#ffffff", 13, anchor="middle", weight=600))
    return written


def legend(theme: dict[str, str], top: float) -> list[str]:
    written = [text(24, top + 14, "Colour: policy version that sampled a token", theme["soft"], 13.5)]
    for version, colour in enumerate(VERSIONS):
        x = 322 + version * 62
        written.append(f'<rect x="{x}" y="{top + 2}" width="14" height="14" rx="3" fill="{colour}"/>')
        written.append(text(x + 20, top + 14, f"v{version}", theme["ink"], 13.5))
    lines = (
        "A training step ends with a publish, in the middle of a batch, whose tokens then have two versions.",
        "The loss corrects each token for its staleness, the number of optimizer steps since it was sampled.",
    )
    for number, line in enumerate(lines):
        written.append(text(24, top + 44 + 22 * number, line, theme["soft"], 13.5))
    return written


def text(x: float, y: float, words: str, colour: str, size: float, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def main() -> None:
    for name, theme in THEMES.items():
        (Path(__file__).parent / f"overlap_{name}.svg").write_text(picture(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
