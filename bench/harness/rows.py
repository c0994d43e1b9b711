"""The requirements, and how kvgate meets them. Ratios are between neighbours: of each round, and of these the median."""

import statistics
from dataclasses import dataclass

from .clients import Work
from .rounds import Case, Samples
from .workload import show_size

UNITS = {
    "cpu_per_gib": "CPU s/GiB",
    "gb_per_s": "GB/s",
    "faults_per_gib": "faults/GiB",
    "cpu_us_per_op": "CPU µs",
    "mb_per_s": "MB/s",
    "load_p99_ms": "ms",
    "share": "%",
    "requests": "requests",
}
SDK = "AWS SDK"
TOKIO_RUSTLS = "tokio-rustls TLS"
BEFORE = "kvgate before"
# A prompt's chunks, by the protection of their space.
KEYS = {"none": "kvgate prompt", "signed": "kvgate prompt, signed", "encrypted": "kvgate prompt, encrypted"}


@dataclass(frozen=True)
class Row:
    """A value of a case, or its ratio to another case's."""

    what: str
    metric: str
    case: Case
    to: Case | None = None
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Result:
    """The result of a row. Without a value: the reason why it was not measured."""

    row: Row
    value: float | None
    low: float | None
    high: float | None
    rounds: int
    reason: str = ""

    @property
    def verdict(self) -> str:
        row = self.row
        if self.value is None:
            return f"not measured: {self.reason}"
        if row.at_most is None and row.at_least is None:
            return ""
        kept = self.value <= row.at_most if row.at_most is not None else self.value >= row.at_least
        return "kept" if kept else "**MISSED**"


def wanted(part_sizes: list[int], object_size: int, peers: list[str]) -> list[Row]:
    """All rows, those that nobody measured this time too."""
    whole = Work("read", object_size).name

    def get(client: str, size: int = object_size, server: str = "nginx") -> Case:
        return Case(server, Work("read", size).name, client)

    rows = [
        Row(
            f"{Work('read', size).name}, not verified / raw floor",
            "cpu_per_gib",
            get("kvgate", size),
            get("floor", size),
            at_most=1.15 if size == object_size else 1.25,
        )
        for size in part_sizes
    ]
    rows += [
        Row(f"{whole}, CRC64 / not verified", "cpu_per_gib", get("kvgate CRC64"), get("kvgate"), at_most=1.2),
        Row(f"{whole}, not verified", "faults_per_gib", get("kvgate"), at_most=100),
        Row(f"{whole}, TLS / plain", "cpu_per_gib", get("kvgate TLS"), get("kvgate"), at_most=2.3),
        # kvgate reads TLS by it, too: what HTTP, signing and the pool cost.
        Row(f"{whole}, TLS, kvgate / tokio-rustls", "cpu_per_gib", get("kvgate TLS"), get(TOKIO_RUSTLS), at_most=1.1),
    ]
    rows += [
        Row(f"{whole}, {protection} / CRC64", "cpu_per_gib", get(KEYS[protection]), get(KEYS["none"]))
        for protection in ("signed", "encrypted")
    ]
    rows += [
        Row(f"{whole}, kvgate / before", "cpu_per_gib", get("kvgate"), get(BEFORE)),
        Row("HEAD, kvgate / before", "cpu_us_per_op", Case("nginx", "HEAD", "kvgate"), Case("nginx", "HEAD", BEFORE)),
    ]
    for peer in peers:
        most = 0.6 if peer in (SDK, "boto3") else 0.5
        rows.append(Row(f"{whole}, kvgate / {peer}", "cpu_per_gib", get("kvgate"), get(peer), at_most=most))
    rows += [
        Row("HEAD", "cpu_us_per_op", Case("nginx", "HEAD", "kvgate"), at_most=25),
        Row("HEAD, AWS SDK", "cpu_us_per_op", Case("nginx", "HEAD", SDK)),
        # 25 µs where the SDK takes 125 to 150: what is left of them on a slower or busier machine.
        Row(
            "HEAD, kvgate / AWS SDK",
            "cpu_us_per_op",
            Case("nginx", "HEAD", "kvgate"),
            Case("nginx", "HEAD", SDK),
            at_most=25 / 150,
        ),
        Row(
            "LOOKUP of unknown chunks, each HEAD, kvgate / LMCache",
            "cpu_us_per_op",
            Case("nginx", "LOOKUP", "kvgate"),
            Case("nginx", "LOOKUP", "LMCache"),
            at_most=1 / 3,
        ),
        Row(
            "PUT / raw send", "cpu_per_gib", Case("nginx", "PUT", "kvgate"), Case("nginx", "PUT", "floor"), at_most=1.25
        ),
        Row("PUT, AWS SDK / raw send", "cpu_per_gib", Case("nginx", "PUT", SDK), Case("nginx", "PUT", "floor")),
    ]
    return rows


def best_peer(samples: Samples, object_size: int, peers: list[str]) -> Row:
    """Throughput on Ceph, to the fastest of the others there."""

    def get(client: str) -> Case:
        return Case("ceph", Work("read", object_size).name, client)

    speeds = {
        peer: statistics.median(measured.gb_per_s for measured in samples.measured[get(peer)].values())
        for peer in peers
        if get(peer) in samples.measured
    }
    best = max(speeds, key=speeds.__getitem__, default="none")
    what = f"GET {show_size(object_size)} on Ceph, kvgate / the fastest of the others ({best})"
    return Row(what, "gb_per_s", get("kvgate"), get(best), at_least=0.95)


def evaluate(row: Row, samples: Samples) -> Result:
    for case in (row.case, row.to):
        if case and not samples.measured.get(case):
            return Result(row, None, None, None, 0, samples.reason(case))
    values = {number: getattr(measured, row.metric) for number, measured in samples.measured[row.case].items()}
    if row.to:
        others = samples.measured[row.to]
        values = {n: value / getattr(others[n], row.metric) for n, value in values.items() if n in others}
    if not values:
        return Result(row, None, None, None, 0, "no round in which both ran")
    low, middle, high = spread(list(values.values()))
    return Result(row, middle, low, high, len(values))


def spread(values: list[float]) -> tuple[float, float, float]:
    """The 10th percentile, the median, the 90th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], statistics.median(values), tenths[-1]
