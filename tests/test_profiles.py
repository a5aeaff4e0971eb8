"""Machine profiles: complete, in known units, sourced, physical; and refused where they are not."""

from __future__ import annotations

import re
import tomllib
from dataclasses import FrozenInstanceError, fields
from importlib import resources
from typing import Any

import pytest

from afdep_sim.errors import Refusal
from afdep_sim.model import profiles
from afdep_sim.model.profiles import UNITS, Profile, available, entries, load_profile

NAMES = ("h100", "h200")
PARAMETERS = [f.name for f in fields(Profile) if f.name not in ("name", "gpu")]
SOURCE = re.compile(r"((H100|H200) )?(measured|published|prior|text|fitted)\b.*:? \S")
"""How a source begins: what kind of knowledge it is, of one GPU where the files' values differ for that reason."""


def unit_of(name: str) -> str:
    return UNITS[max((suffix for suffix in UNITS if name.endswith(suffix)), key=len)]


# ---- the shipped ones ------------------------------------------------------------------------------------------------


def test_the_shipped_profiles() -> None:
    assert available() == list(NAMES)


@pytest.mark.parametrize("name", ["h100", "H100", "h200", "H200"])
def test_a_profile_loads_by_name_in_any_case(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == profile.gpu == name.upper()
    assert all(isinstance(getattr(profile, parameter), float) for parameter in PARAMETERS)
    with pytest.raises(FrozenInstanceError):
        profile.signal_ns = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "h100.toml", "B200", "../profiles/h100"])
def test_an_unknown_profile_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(Refusal, match="is not one of h100, h200"):
        load_profile(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_its_unit_and_a_source(name: str) -> None:
    found = entries(name)
    assert sorted(e.name for e in found) == sorted(PARAMETERS)
    profile = load_profile(name)
    for entry in found:
        assert entry.unit == unit_of(entry.name), entry
        assert SOURCE.match(entry.source), entry
        assert entry.value == getattr(profile, entry.name), entry
        assert entry.value > 0 or entry.unit == "setting", entry


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_of_a_file_is_a_value_a_unit_and_a_source(name: str) -> None:
    text = resources.files(profiles).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    for key, item in tomllib.loads(text).items():
        if key == "gpu":
            assert item == name.upper()
            continue
        assert set(item) == {"value", "unit", "source"}, key
        assert type(item["value"]) in (int, float), key


@pytest.mark.parametrize("name", NAMES)
def test_no_entry_speaks_of_a_layout_a_table_or_a_token_count(name: str) -> None:
    forbidden = re.compile(
        r"\d|layout|table|tokens|topk|hidden|experts|bucket|arm|afdep|m2n|attention|ffn", re.IGNORECASE
    )
    for entry in entries(name):
        assert not forbidden.search(entry.name), entry
        assert isinstance(entry.value, float), entry
        assert not re.search(r"\d+ ?[AF]:?\d+ ?[AF]|\bT ?=|\d+ tokens|table \d", entry.source), entry


def test_what_is_measured_on_one_gpu_differs_between_the_files() -> None:
    h100, h200 = load_profile("H100"), load_profile("H200")
    different = {p for p in PARAMETERS if getattr(h100, p) != getattr(h200, p)}
    assert different == {"signal_ns", "grid_sync_ns", "hbm_bytes_per_ns", "sm_reduce_bytes_per_ns"}


# ---- malformed ones --------------------------------------------------------------------------------------------------


def toml(items: dict[str, Any]) -> str:
    lines = []
    for key, item in items.items():
        if isinstance(item, dict):
            lines.append(f"[{key}]")
            lines += [f"{k} = {v!r}" if not isinstance(v, str) else f'{k} = "{v}"' for k, v in item.items()]
        else:
            lines.insert(0, f'{key} = "{item}"' if isinstance(item, str) else f"{key} = {item!r}")
    return "\n".join(lines)


@pytest.fixture
def shipped() -> dict[str, Any]:
    return tomllib.loads(resources.files(profiles).joinpath("h100.toml").read_text(encoding="utf-8"))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a profile from TOML text made of the items given."""

    def load_items(items: dict[str, Any]) -> Profile:
        text = toml(items)
        monkeypatch.setattr(profiles, "_read", lambda name: tomllib.loads(text))
        return load_profile("h100")

    return load_items


def test_the_text_survives_the_round_trip(load: Any, shipped: dict[str, Any]) -> None:
    before = load_profile("h100")
    assert load(shipped) == before


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_missing_entry_is_refused_by_name(load: Any, shipped: dict[str, Any], name: str) -> None:
    del shipped[name]
    with pytest.raises(Refusal, match=rf"lacks {name}"):
        load(shipped)


@pytest.mark.parametrize("extra", ["warp_speed_ns", "name", "signal_us"])
def test_an_extra_entry_is_refused_by_name(load: Any, shipped: dict[str, Any], extra: str) -> None:
    shipped[extra] = {"value": 1, "unit": "ns", "source": "prior: none"}
    with pytest.raises(Refusal, match=rf"unknown entries {extra}"):
        load(shipped)


def test_an_extra_entry_without_a_table_is_refused(load: Any, shipped: dict[str, Any]) -> None:
    shipped["warp_speed_ns"] = 3
    with pytest.raises(Refusal, match="warp_speed_ns"):
        load(shipped)


@pytest.mark.parametrize("name", ["signal_ns", "port_bytes_per_ns", "gather_pass_bytes", "gather_in_flight_slots"])
def test_a_wrong_unit_is_refused(load: Any, shipped: dict[str, Any], name: str) -> None:
    shipped[name]["unit"] = "us"
    with pytest.raises(Refusal, match=rf"{name} in 'us', not '{unit_of(name)}'"):
        load(shipped)


@pytest.mark.parametrize("value", [-1, -0.5, 0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["signal_ns", "port_bytes_per_ns"])
def test_an_unphysical_value_is_refused(load: Any, shipped: dict[str, Any], name: str, value: float) -> None:
    shipped[name]["value"] = value
    with pytest.raises(Refusal, match=name):
        load(shipped)


def test_a_setting_may_be_zero_but_not_negative(load: Any, shipped: dict[str, Any]) -> None:
    shipped["words_queue_behind_rows"]["value"] = 0
    assert load(shipped).words_queue_behind_rows == 0
    shipped["words_queue_behind_rows"]["value"] = -1
    with pytest.raises(Refusal, match="words_queue_behind_rows"):
        load(shipped)


@pytest.mark.parametrize("part", ["value", "unit", "source"])
def test_an_entry_without_one_of_its_parts_is_refused(load: Any, shipped: dict[str, Any], part: str) -> None:
    del shipped["signal_ns"][part]
    with pytest.raises(Refusal, match="signal_ns"):
        load(shipped)


def test_a_file_that_names_no_gpu_is_refused(load: Any, shipped: dict[str, Any]) -> None:
    del shipped["gpu"]
    with pytest.raises(Refusal, match="gpu"):
        load(shipped)


def test_an_entry_that_is_no_number_is_refused(load: Any, shipped: dict[str, Any]) -> None:
    shipped["signal_ns"]["value"] = "fast"
    with pytest.raises(Refusal, match="signal_ns"):
        load(shipped)


# ---- scaling ---------------------------------------------------------------------------------------------------------


def test_scaling_multiplies_what_it_names_and_nothing_else() -> None:
    profile = load_profile("H100")
    scaled = profile.scaled(signal_ns=2, port_bytes_per_ns=0.25)
    for name in PARAMETERS:
        factor = {"signal_ns": 2, "port_bytes_per_ns": 0.25}.get(name, 1)
        assert getattr(scaled, name) == factor * getattr(profile, name), name
    assert (scaled.name, scaled.gpu) == (profile.name, profile.gpu)
    assert profile == load_profile("H100")
    assert profile.scaled() == profile


@pytest.mark.parametrize("name", ["signal", "name", "gpu", "signal_us"])
def test_scaling_refuses_a_name_it_does_not_have(name: str) -> None:
    with pytest.raises(Refusal, match=rf"'{name}' is not one of"):
        load_profile("H100").scaled(**{name: 2.0})
