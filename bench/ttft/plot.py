"""The results as lines: seconds to the first token by tokens of the document."""

import math

from harness.report import text

from .measure import FIRST, MEMORY, PLAIN, S3
from .tables import Samples

COLOURS = {PLAIN: "#e8a33d", FIRST: "#9aa0a6", S3: "#1a73e8", MEMORY: "#188038"}
NAMES = {
    PLAIN: "computed: plain vLLM",
    FIRST: "computed and stored",
    S3: "loaded from S3",
    MEMORY: "loaded from memory",
}
LEFT, TOP, WIDTH, HEIGHT = 70, 50, 560, 320


def svg(title: str, samples: Samples) -> str:
    """Medians, with a line from the least to the most of the rounds."""
    cases = samples.cases("documents")
    most_tokens = max(size for size, _ in cases)
    most = max(one.ttft_s for size, case in cases for who in COLOURS for one in samples.of("documents", case, who))
    step = nice(most / 5)
    top = math.ceil(most / step) * step

    def x(tokens: float) -> float:
        return LEFT + WIDTH * tokens / most_tokens

    def y(seconds: float) -> float:
        return TOP + HEIGHT * (1 - seconds / top)

    parts = [text(10, 22, f"{title}: time to first token by prompt length, s", "title")]
    for number in range(round(top / step) + 1):
        parts.append(line(LEFT, y(number * step), LEFT + WIDTH, y(number * step), "#ddd"))
        parts.append(text(LEFT - 8, y(number * step) + 4, f"{number * step:g}", "left"))
    for size, _ in cases:
        parts.append(line(x(size), TOP + HEIGHT, x(size), TOP + HEIGHT + 5, "#333"))
        parts.append(text(x(size), TOP + HEIGHT + 20, f"{size / 1000:g}k", "below"))
    for number, (who, colour) in enumerate(COLOURS.items()):
        points = []
        for size, case in cases:
            seconds = [one.ttft_s for one in samples.of("documents", case, who)]
            points.append((x(size), y(samples.median("documents", case, who, lambda one: one.ttft_s))))
            parts.append(line(x(size), y(min(seconds)), x(size), y(max(seconds)), colour))
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points]
        parts.append(f'<rect x="{LEFT + 20}" y="{TOP + 8 + 20 * number}" width="14" height="4" fill="{colour}"/>')
        parts.append(text(LEFT + 42, TOP + 15 + 20 * number, NAMES[who], "name"))
    style = (
        "text { font: 13px sans-serif; fill: #222 } .title { font-size: 16px; font-weight: bold } "
        ".left { text-anchor: end } .below { text-anchor: middle }"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{TOP + HEIGHT + 40}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, not less than the step."""
    power = 10 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)
