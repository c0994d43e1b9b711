"""The results for people: tables in Markdown, and bars."""

from html import escape

from .rounds import Case, Samples
from .rows import UNITS, Result, Row, spread

BAR_COLOURS = {"floor": "#9aa0a6", "kvgate": "#1a73e8"}
OTHER_COLOUR = "#e8a33d"


def markdown(title: str, facts: list[str], results: list[Result], samples: Samples, missing: dict[str, str]) -> str:
    lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), "", *wanted_table(results)]
    lines += ["", "## Measured", "", "Medians over the rounds, of the client's process only.", ""]
    lines += ["| server | what | client | GB/s | CPU s/GiB | CPU µs/request | minor faults/GiB | rounds |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    lines += [measured_line(case, samples) for case in sorted(samples.measured, key=lambda case: order(case, samples))]
    if missing:
        lines += ["", "## Missing", "", *(f"- {who}: {reason}" for who, reason in missing.items())]
    failed = [
        f"- {case.server}, {case.work}, {case.client}: {why}"
        for case, why in samples.failures.items()
        if case.server not in missing and not case.client.startswith(tuple(missing))
    ]
    if failed:
        lines += ["", "## Failed at least once", "", *failed]
    return "\n".join(lines) + "\n"


def wanted_table(results: list[Result]) -> list[str]:
    return [
        "## Wanted",
        "",
        "| what | in | got | 10 % to 90 % | rounds | wanted | |",
        "|---|---|---:|---:|---:|---|---|",
        *(wanted_line(result) for result in results),
    ]


def wanted_line(result: Result) -> str:
    row = result.row
    limit = f"≤ {row.at_most:.3g}" if row.at_most is not None else f"≥ {row.at_least:.3g}" if row.at_least else ""
    got, between = "", ""
    if result.value is not None:
        got = f"{result.value:.3g}"
        between = f"{result.low:.3g} to {result.high:.3g}"
    return f"| {row.what} | {unit(row)} | {got} | {between} | {result.rounds} | {limit} | {result.verdict} |"


def unit(row: Row) -> str:
    return f"ratio of {UNITS[row.metric]}" if row.to else UNITS[row.metric]


def order(case: Case, samples: Samples) -> tuple:
    """Servers and works as they were measured, then who costs least first."""
    cost = median(case, "cpu_per_gib" if has_bytes(case, samples) else "cpu_us_per_op", samples)
    return (case.server != "nginx", case.work, cost)


def has_bytes(case: Case, samples: Samples) -> bool:
    return any(measured.bytes for measured in samples.measured[case].values())


def median(case: Case, metric: str, samples: Samples) -> float:
    return spread([getattr(measured, metric) for measured in samples.measured[case].values()])[1]


def measured_line(case: Case, samples: Samples) -> str:
    rounds = len(samples.measured[case])
    per_op = f"{median(case, 'cpu_us_per_op', samples):.1f}"
    per_byte = ["", "", ""]
    if has_bytes(case, samples):
        speed, cost, faults = (median(case, name, samples) for name in ("gb_per_s", "cpu_per_gib", "faults_per_gib"))
        per_byte = [f"{speed:.2f}", f"{cost:.3f}", f"{faults:.0f}"]
    cells = [case.server, case.work, case.client, per_byte[0], per_byte[1], per_op, per_byte[2], str(rounds)]
    return f"| {' | '.join(cells)} |"


def svg(title: str, samples: Samples) -> str:
    """Bars of CPU seconds per GiB by client, a panel for each server and size; the line is 10 % to 90 %."""
    panels: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(samples.measured, key=lambda case: order(case, samples)):
        if case.work.startswith("GET"):
            panels.setdefault((case.server, case.work), []).append(case)
    spreads = {
        case: spread([measured.cpu_per_gib for measured in samples.measured[case].values()])
        for cases in panels.values()
        for case in cases
    }
    longest = max((high for _, _, high in spreads.values()), default=1)
    left, width, bar, gap = 120, 560, 20, 6
    scale = width / longest
    parts, y = [text(10, 22, title, "title")], 40
    for (server, work), cases in panels.items():
        y += 24
        parts.append(text(10, y, f"{work} from {server}: client CPU, s/GiB (shorter is better)", "panel"))
        y += 10
        for case in cases:
            low, middle, high = spreads[case]
            colour = BAR_COLOURS.get(case.client.split()[0], OTHER_COLOUR)
            parts.append(text(left - 8, y + 15, case.client, "name"))
            parts.append(f'<rect x="{left}" y="{y}" width="{middle * scale:.1f}" height="{bar}" fill="{colour}"/>')
            line = f'x1="{left + low * scale:.1f}" x2="{left + high * scale:.1f}" y1="{y + bar / 2}" y2="{y + bar / 2}"'
            parts.append(f'<line {line} stroke="#333"/>')
            parts.append(text(left + high * scale + 8, y + 15, f"{middle:.2f}", "value"))
            y += bar + gap
    style = (
        "text { font: 13px sans-serif; fill: #222 } .title { font-size: 16px; font-weight: bold } "
        ".panel { font-weight: bold } .name { text-anchor: end }"
    )
    size = f'width="{left + width + 70}" height="{y + 14}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'
