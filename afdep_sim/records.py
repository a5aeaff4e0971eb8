"""Rows of figures: what the record published, and what an experiment leaves behind in the same columns.

A row is a frozen dataclass and one CSV line. Published figures ship with the package (`published_rows`); results of
this project are built by `round_trip_row` and `paired_change_row`, carry an id that follows from their configuration
alone, and are written whole or not at all (`write_rows`). `find_published` sets a published row beside a result, and
only where everything that the row states agrees.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path

from afdep_sim.errors import Refusal
from afdep_sim.protocol import SWITCHES, Protocol, Resolved
from afdep_sim.routing import routing_name
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

ROUND_TRIP = "round_trip_us"
PAIRED_CHANGE = "paired_change_pct"
DEFAULT_SMS = 24
"""A row whose arm equals its baseline arm states a change against this many transport SMs."""


@dataclass(frozen=True)
class Row:
    """One figure, published or measured: the configuration, the metric, and its value in the unit the metric names.

    The fields are the CSV's columns in order. A number that is not stated is None, a text that is not stated is ''.
    Layout columns count ranks and NVLink domains; `capacity` and `tokens` are tokens; `sms` are transport SMs;
    `value_low` and `value_high` are the ends of a range whose midpoint is `value`.
    """

    id: str
    section: str = ""
    cluster: str = ""
    gpu: str = ""
    attention_ranks: int | None = None
    ffn_ranks: int | None = None
    attention_domains: int | None = None
    ffn_domains: int | None = None
    gpus_per_domain: int | None = None
    mixed_role: int | None = None
    hidden: int | None = None
    dispatch_dtype: str = ""
    topk: int | None = None
    experts: int | None = None
    capacity: int | None = None
    sms: int | None = None
    routing: str = ""
    mode: str = ""
    arm: str = ""
    baseline_arm: str = ""
    tokens: int | None = None
    metric: str = ""
    phase: str = ""
    value: float | None = None
    value_low: float | None = None
    value_high: float | None = None
    load: str = ""
    notes: str = ""
    protocol: str = ""
    expressible: int | None = None
    why_not: str = ""
    twin: str = ""
    stage: str = ""


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Row))
"""The columns of every CSV of figures, in order."""
_KINDS = {field.name: str(field.type) for field in fields(Row)}


# ---- reading and writing --------------------------------------------------------------------------------------------


def published_rows() -> list[Row]:
    """The record's published figures that ship with the package, in file order."""
    text = resources.files("afdep_sim").joinpath("data/published.csv").read_text(encoding="utf-8")
    return _parse(text, "published.csv")


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a CSV that `write_rows` wrote.

    Raises `Refusal` where the columns are not `COLUMNS` or a number cannot be read, and `OSError` where there is no
    such file.
    """
    return _parse(Path(path).read_text(encoding="utf-8"), str(path))


def write_rows(path: str | Path, rows: Iterable[Row | Mapping[str, object]]) -> None:
    """Write `rows` as a CSV in exactly the published columns, replacing `path` whole or leaving it as it was.

    A mapping may leave columns out (they stay blank). Raises `Refusal` for a column that does not exist, for a row
    without an id and for a folder that does not exist; whatever goes wrong, `path` is not touched.
    """
    path = Path(path)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row) if isinstance(row, Row) else dict(row)
        unknown = [name for name in cells if name not in COLUMNS]
        if unknown:
            raise Refusal(f"column {unknown[0]!r} is not a column of a row of figures")
        if not cells.get("id"):
            raise Refusal("a row of figures needs an id")
        writer.writerow({name: _cell(value) for name, value in cells.items()})
    if not path.parent.is_dir():
        raise Refusal(f"the folder of {path} does not exist")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _parse(text: str, name: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise Refusal(f"{name} does not have the {len(COLUMNS)} columns of a file of figures, in their order")
    rows = []
    for cells in reader:
        try:
            if None in cells:
                raise ValueError("it has more cells than columns")
            values = {column: _value(column, cells[column]) for column in COLUMNS}
            rows.append(Row(**values))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise Refusal(f"line {reader.line_num} of {name} cannot be read: {error}") from None
    return rows


def _value(column: str, cell: str | None) -> str | int | float | None:
    if cell is None:
        raise ValueError(f"column {column!r} is missing")
    if _KINDS[column] == "str":
        return cell
    if cell == "":
        return None
    return int(cell) if _KINDS[column].startswith("int") else float(cell)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


# ---- published rows beside a result ---------------------------------------------------------------------------------


def protocol_of(arm: str, tree: str, transport_sms: int = DEFAULT_SMS) -> Protocol:
    """The protocol of `arm` in a row whose `protocol` column is `tree`.

    The column states what the row's source tree had, relative to the full 1.0.0 dense protocol: first its switches,
    then the arm's own. It has no effect on `fastafd_m2n`. Raises `Refusal` for what `Protocol` does not express.
    """
    preset, *own = arm.split("+")
    if preset != "afdep":
        return Protocol.parse(arm, transport_sms)
    full = [f"{switch.env}=0" for switch in SWITCHES]
    switches = [*full, *(part for part in tree.split(";") if part), *own]
    return Protocol(preset, transport_sms=transport_sms).with_switches(switches)


def agreeing_rows(
    rows: Sequence[Row],
    *,
    gpu: str,
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    baseline: Protocol | None = None,
) -> list[Row]:
    """Every row that states the figure of `protocol` in this configuration, the best one first.

    Without `baseline` these are round trips, with it paired changes of `protocol` against `baseline`. A row agrees
    if it is expressible and unloaded and names the same GPU, layout, shape, routing, tokens and transport SMs, and if
    its arms in its tree resolve to the same protocols on `topology` (switches without effect there do not count).
    Rows of the record's result table come first, then section 15, then the others in file order. Nothing agrees with
    token counts that differ between ranks, or with a bucket, a layout of received rows or anything else of a workload
    that is not the default and that the record does not state.
    Raises `Refusal` where the configuration itself is one.
    """
    tokens = _uniform_tokens(workload)
    if tokens is None or workload.bucket != replace(workload, bucket=0).bucket or _unstated(workload):
        return []
    stated = _columns(gpu, topology, workload, protocol)
    stated |= {
        "metric": ROUND_TRIP if baseline is None else PAIRED_CHANGE,
        "phase": "",
        "load": "none",
        "tokens": tokens,
        "expressible": 1,
    }
    wanted = _without_off(protocol, topology)
    against = None if baseline is None else _without_off(baseline, topology)
    found = [
        row
        for row in rows
        if row.value is not None
        and all(getattr(row, column) == value for column, value in stated.items())
        and _arm_of(row, topology) == wanted
        and (against is None or _baseline_of(row, topology) == against)
    ]
    order = {"result": 0, "15": 1}
    return sorted(found, key=lambda row: order.get(row.section, 2))


def find_published(
    rows: Sequence[Row],
    *,
    gpu: str,
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    baseline: Protocol | None = None,
) -> Row | None:
    """The first of `agreeing_rows`: the published round trip of `protocol`, or its paired change against `baseline`.

    None where no published row agrees. Raises `Refusal` where the configuration itself is one.
    """
    found = agreeing_rows(
        rows, gpu=gpu, topology=topology, workload=workload, protocol=protocol, baseline=baseline
    )
    return found[0] if found else None


def _arm_of(row: Row, topology: Topology) -> Resolved | None:
    return _resolved(row.arm, row.protocol, row.sms, topology)


def _baseline_of(row: Row, topology: Topology) -> Resolved | None:
    sms = DEFAULT_SMS if row.arm == row.baseline_arm else row.sms
    return _resolved(row.baseline_arm, row.protocol, sms, topology)


def _resolved(arm: str, tree: str, sms: int | None, topology: Topology) -> Resolved | None:
    """What an arm of a row is on `topology`; None where the row does not say or `Protocol` cannot express it."""
    if sms is None:
        return None
    try:
        return _without_off(protocol_of(arm, tree, sms), topology)
    except Refusal:
        return None


def _without_off(protocol: Protocol, topology: Topology) -> Resolved:
    return replace(protocol.resolve(topology), off=())


def _uniform_tokens(workload: Workload) -> int | None:
    counts = set(workload.tokens) if isinstance(workload.tokens, tuple) else {workload.tokens}
    return counts.pop() if len(counts) == 1 else None


# ---- rows of this project's results ---------------------------------------------------------------------------------


def round_trip_row(
    round_trip_us: float,
    *,
    gpu: str,
    profile: str,
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    low_us: float | None = None,
    high_us: float | None = None,
    notes: str = "",
) -> Row:
    """The row of a modelled round trip in microseconds, the maximum over Attention ranks; kept to 1 ns.

    `profile` names the machine's profile, `low_us` and `high_us` the ends over repeats. The id follows from the
    configuration alone. Raises `Refusal` for a value that is not above 0 and for a configuration that is refused.
    """
    if not (math.isfinite(round_trip_us) and round_trip_us > 0):
        raise Refusal(f"round trip {round_trip_us} us is not a time above 0")
    ends = (low_us, high_us)
    return _result(ROUND_TRIP, round_trip_us, ends, gpu, profile, topology, workload, protocol, None, notes)


def paired_change_row(
    change_pct: float,
    *,
    gpu: str,
    profile: str,
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    baseline: Protocol,
    low_pct: float | None = None,
    high_pct: float | None = None,
    notes: str = "",
) -> Row:
    """The row of a modelled change of `protocol` against `baseline` in percent, as `paired_change_pct` computes it.

    Positive is slower. Raises `Refusal` for a value that is not a number, for a configuration that is refused, and for
    arms whose transport SMs differ in a way that the columns cannot say (a change of SMs is one arm against itself at
    24).
    """
    if not math.isfinite(change_pct):
        raise Refusal(f"change {change_pct} % is not a number")
    same_arm = protocol.arm == baseline.arm
    if baseline.transport_sms != (DEFAULT_SMS if same_arm else protocol.transport_sms):
        raise Refusal(
            f"transport SMs {protocol.transport_sms} against {baseline.transport_sms} do not fit one row; "
            f"arms share them, or one arm is set against itself at {DEFAULT_SMS}"
        )
    ends = (low_pct, high_pct)
    return _result(PAIRED_CHANGE, change_pct, ends, gpu, profile, topology, workload, protocol, baseline, notes)


def paired_change_pct(arm_us: Sequence[float], baseline_us: Sequence[float]) -> float:
    """Percent by which the arm is slower than its baseline: geometric mean of the paired ratios, minus 1, times 100.

    `arm_us[i]` and `baseline_us[i]` are the round trips of repeat i. Raises `Refusal` for lists that are empty or of
    different lengths, and for times that are not above 0.
    """
    if len(arm_us) != len(baseline_us) or not arm_us:
        raise Refusal(f"{len(arm_us)} round trips cannot be paired with {len(baseline_us)}")
    for time in (*arm_us, *baseline_us):
        if not (math.isfinite(time) and time > 0):
            raise Refusal(f"round trip {time} us is not a time above 0")
    ratios = [math.log(arm / baseline) for arm, baseline in zip(arm_us, baseline_us, strict=True)]
    return 100 * math.expm1(math.fsum(ratios) / len(ratios))


def _result(
    metric: str,
    value: float,
    ends: tuple[float | None, float | None],
    gpu: str,
    profile: str,
    topology: Topology,
    workload: Workload,
    protocol: Protocol,
    baseline: Protocol | None,
    notes: str,
) -> Row:
    resolved = protocol.resolve(topology)
    if baseline is not None:
        baseline.resolve(topology)
    columns = _columns(gpu, topology, workload, protocol)
    tokens = _uniform_tokens(workload)
    kept = [None if end is None else round(end, 3) for end in ends]
    said = [f"model, profile {profile}", f"seed {workload.seed}"]
    if tokens is None:
        said.append(f"tokens {workload.tokens} in rank order")
    if workload.bucket != replace(workload, bucket=0).bucket:
        said.append(f"bucket {workload.bucket}")
    said += _unstated(workload)
    if resolved.off:
        said.append("no effect here: " + " ".join(resolved.off))
    if notes:
        said.append(notes)
    # Relative to the full 1.0.0 protocol, as the column is: what `Protocol.afdep()` has on.
    tree = ";".join(f"{switch.env}=1" for switch in SWITCHES if getattr(Protocol.afdep(), switch.field))
    identity = {
        "metric": metric,
        "gpu": gpu,
        "profile": profile,
        "topology": asdict(topology),
        "workload": asdict(workload) | {"routing": routing_name(workload.routing)},
        "protocol": [tree, protocol.arm, protocol.transport_sms],
        "baseline": None if baseline is None else [baseline.arm, baseline.transport_sms],
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    name = (
        f"model.{topology.name}-h{workload.hidden}-{routing_name(workload.routing)}."
        f"t{'mixed' if tokens is None else tokens}.{protocol.arm}.{metric.replace('_', '-')}.{digest}"
    )
    return Row(
        id=name.lower().replace("_", "-"),
        section="model",
        cluster="model",
        arm=protocol.arm,
        baseline_arm="" if baseline is None else baseline.arm,
        tokens=tokens,
        metric=metric,
        value=round(value, 3),
        value_low=kept[0],
        value_high=kept[1],
        load="none",
        notes="; ".join(said),
        protocol=tree,
        expressible=1,
        stage="one_domain_core",
        **columns,  # type: ignore[arg-type]
    )


def _columns(gpu: str, topology: Topology, workload: Workload, protocol: Protocol) -> dict[str, object]:
    """The columns that state a one-domain configuration; the same for a result and for the rows that agree with it."""
    return {
        "gpu": gpu,
        "attention_ranks": topology.attention_ranks,
        "ffn_ranks": topology.ffn_ranks,
        "attention_domains": 1,
        "ffn_domains": 1,
        "gpus_per_domain": topology.gpus_per_domain,
        "mixed_role": 0,
        "hidden": workload.hidden,
        "dispatch_dtype": workload.dtype,
        "topk": workload.topk,
        "experts": workload.real_experts(topology),
        "capacity": workload.capacity,
        "sms": protocol.transport_sms,
        "routing": routing_name(workload.routing),
        "mode": "one_domain",
    }


def _unstated(workload: Workload) -> list[str]:
    """'field value' of everything of a workload that no column states and that is not the default."""
    names = ("dropped_share", "expanded", "bias", "combine_weights", "expert_alignment", "host_counts")
    defaults = Workload(tokens=0)
    return [f"{n} {getattr(workload, n)}" for n in names if getattr(workload, n) != getattr(defaults, n)]
