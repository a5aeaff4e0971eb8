"""Machine profiles: one TOML file per machine; every number has a unit and a source. Physical parameters only."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from importlib import resources

from afdep_sim.errors import Refusal

UNITS = {"ns": "ns", "bytes_per_ns": "GB/s", "slots": "rows", "rows": "setting", "bytes": "bytes"}
"""Last words of a field name, and the unit they stand for (1 byte/ns = 1 GB/s)."""


@dataclass(frozen=True)
class Profile:
    """What the model knows of a machine. Times in ns, rates in bytes per ns; the meaning of each is in the file."""

    name: str
    gpu: str
    graph_edge_ns: float
    programmatic_launch_ns: float
    programmatic_wake_ns: float
    block_start_ns: float
    launch_skew_ns: float
    issue_ns: float
    load_ns: float
    store_word_ns: float
    atomic_ns: float
    poll_ns: float
    signal_ns: float
    local_word_ns: float
    row_latency_ns: float
    row_acknowledge_ns: float
    bulk_load_ns: float
    bulk_store_local_ns: float
    group_sync_ns: float
    block_sync_ns: float
    grid_sync_ns: float
    count_token_ns: float
    prefix_sum_ns: float
    gather_ns: float
    gather_in_flight_slots: float
    gather_pass_bytes: float
    port_bytes_per_ns: float
    hbm_bytes_per_ns: float
    sm_copy_bytes_per_ns: float
    sm_reduce_bytes_per_ns: float
    words_queue_behind_rows: float

    def scaled(self, **factors: float) -> Profile:
        """This profile with some entries multiplied, for sensitivity studies; refuses names it does not have."""
        names = {f.name for f in fields(self)} - {"name", "gpu"}
        for name in factors:
            if name not in names:
                raise Refusal(f"profile entry {name!r} is not one of {', '.join(sorted(names))}")
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


@dataclass(frozen=True)
class Entry:
    """One number of a profile file: `source` is measured, published, or prior, and says where or why."""

    name: str
    value: float
    unit: str
    source: str


def available() -> list[str]:
    """The names of the shipped profiles."""
    folder = resources.files(__package__)
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def entries(name: str) -> list[Entry]:
    """Every number of a shipped profile with its unit and source. Raises `Refusal` for an unknown or malformed one."""
    found = []
    for key, item in _read(name).items():
        if key == "gpu":
            continue
        if not isinstance(item, dict) or set(item) != {"value", "unit", "source"}:
            raise Refusal(f"profile {name!r} entry {key} is not a table of value, unit and source")
        value, unit, source = item["value"], item["unit"], item["source"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refusal(f"profile {name!r} has {key} = {value!r}, not a finite number")
        if not isinstance(unit, str) or not isinstance(source, str) or not source.strip():
            raise Refusal(f"profile {name!r} entry {key} does not say its unit and source in words")
        found.append(Entry(key, float(value), unit, source))
    return found


def load_profile(name: str) -> Profile:
    """'H100' or 'H200' (any case) -> Profile.

    Raises `Refusal` for an unknown name, and for missing, extra, mislabelled or unphysical entries.
    """
    gpu = _read(name).get("gpu")
    if not isinstance(gpu, str):
        raise Refusal(f"profile {name!r} does not name its gpu")
    found = {e.name: e for e in entries(name)}
    names = [f.name for f in fields(Profile) if f.name not in ("name", "gpu")]
    if missing := sorted(set(names) - set(found)):
        raise Refusal(f"profile {name!r} lacks {', '.join(missing)}")
    if extra := sorted(set(found) - set(names)):
        raise Refusal(f"profile {name!r} has unknown entries {', '.join(extra)}")
    for entry in found.values():
        suffix = next(s for s in sorted(UNITS, key=len, reverse=True) if entry.name.endswith(s))
        if entry.unit != UNITS[suffix]:
            raise Refusal(f"profile {name!r} gives {entry.name} in {entry.unit!r}, not {UNITS[suffix]!r}")
        if entry.value < 0 or (entry.value == 0 and suffix != "rows"):
            raise Refusal(f"profile {name!r} has {entry.name} = {entry.value}, not above 0")
    return Profile(name=name.upper(), gpu=gpu, **{key: found[key].value for key in names})


def _read(name: str) -> dict[str, object]:
    known = available()
    if name.lower() not in known:
        raise Refusal(f"profile {name!r} is not one of {', '.join(known)}")
    text = resources.files(__package__).joinpath(f"{name.lower()}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
