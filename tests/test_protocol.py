"""Arms and switches: the strings users write, what is refused, and what each switch becomes on a topology."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afdep_sim.errors import Refusal
from afdep_sim.protocol import SWITCH_OF_ENV, SWITCHES, Exit, Protocol, Resolved
from afdep_sim.topology import Topology

LAYOUT = Topology.parse("2A2F")
SINGLE = Topology.parse("3A1F")
FREE = tuple(switch for switch in SWITCHES if len(switch.built) == 2)
SHIPPED = Resolved(
    role_aware=True,
    entry_barriers=False,
    union_counts=False,
    exit=Exit.PER_BLOCK,
    union_buffers=False,
    collect_view=False,
    topk_layout=False,
    single_ffn_prefix=False,
    transport_sms=24,
    off=(),
)
BASELINE = Resolved(
    role_aware=False,
    entry_barriers=True,
    union_counts=True,
    exit=Exit.ALL_RANKS,
    union_buffers=True,
    collect_view=False,
    topk_layout=False,
    single_ffn_prefix=False,
    transport_sms=24,
    off=(),
)


# ---- arms -----------------------------------------------------------------------------------------------------------


def test_presets() -> None:
    assert Protocol.parse("afdep") == Protocol.afdep() == Protocol()
    assert Protocol.parse(" fastafd_m2n ") == Protocol.fastafd_m2n() == Protocol("fastafd_m2n")
    assert Protocol.parse("afdep", transport_sms=16) == Protocol.afdep(transport_sms=16)
    assert Protocol.fastafd_m2n(8).transport_sms == 8


@pytest.mark.parametrize("switch", FREE, ids=lambda switch: switch.env)
def test_each_switch_sets_its_own_field_only(switch) -> None:  # type: ignore[no-untyped-def]
    protocol = Protocol.parse(f"afdep+{switch.env}=1")
    assert protocol == replace(Protocol(), **{switch.field: True})  # type: ignore[arg-type]
    assert Protocol.parse(f"afdep+{switch.env}=0") == Protocol()
    assert SWITCH_OF_ENV[switch.env] is switch


def test_every_combination_of_switches_reads_back() -> None:
    for preset in ("afdep", "fastafd_m2n"):
        for mask in range(1 << len(FREE)):
            chosen = {switch.field: bool(mask >> i & 1) for i, switch in enumerate(FREE)}
            protocol = Protocol(preset, **chosen)
            assert Protocol.parse(protocol.arm) == protocol
            assert protocol.arm.count("+") == mask.bit_count()


def test_the_arm_names_what_differs_from_the_preset() -> None:
    assert Protocol().arm == "afdep"
    assert Protocol(union_notify=True, all_rank_exit=True).arm == "afdep+AFDEP_UNION_NOTIFY=1+AFDEP_ALL_RANK_EXIT=1"


def test_the_last_of_two_settings_holds() -> None:
    assert Protocol.parse("afdep+AFDEP_UNION_NOTIFY=1+AFDEP_UNION_NOTIFY=0") == Protocol()


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        ("", "protocol preset '' is not one of afdep, fastafd_m2n"),
        ("masked", "protocol preset 'masked' is not one of afdep, fastafd_m2n"),
        ("AFDEP_UNION_NOTIFY=1", "protocol preset 'AFDEP_UNION_NOTIFY=1' is not one of"),
        ("afdep+AFDEP_UNION_HYBRID=1", "switch 'AFDEP_UNION_HYBRID=1' is unknown or not built yet; the switches are"),
        ("afdep+COLLECT", "switch 'COLLECT' is unknown or not built yet"),
        ("afdep+dev:nothing", "switch 'dev:nothing' is unknown or not built yet"),
        ("afdep+dev:per_cta_release", "switch 'dev:per_cta_release' is unknown or not built yet"),
        ("afdep+", "switch '' is unknown or not built yet"),
        ("afdep+afdep_union_notify=1", "switch 'afdep_union_notify=1' is unknown or not built yet"),
        ("afdep+AFDEP_UNION_NOTIFY", "switch 'AFDEP_UNION_NOTIFY' takes AFDEP_UNION_NOTIFY=0 or AFDEP_UNION_NOTIFY=1"),
        ("afdep+AFDEP_UNION_NOTIFY=2", "switch 'AFDEP_UNION_NOTIFY=2' takes AFDEP_UNION_NOTIFY=0 or"),
        ("afdep+AFDEP_UNION_NOTIFY=", "switch 'AFDEP_UNION_NOTIFY=' takes AFDEP_UNION_NOTIFY=0 or"),
        (
            "afdep+AFDEP_SHARED_FFN_RECEIVE=0",
            r"AFDEP_SHARED_FFN_RECEIVE=0 \(record section 15\) is not built yet; only AFDEP_SHARED_FFN_RECEIVE=1 is",
        ),
    ],
)
def test_arms_that_are_refused(arm: str, sentence: str) -> None:
    with pytest.raises(Refusal, match=f"^{sentence}"):
        Protocol.parse(arm)


def test_a_switch_with_one_built_state_accepts_that_state() -> None:
    assert Protocol.parse("afdep+AFDEP_SHARED_FFN_RECEIVE=1") == Protocol()
    with pytest.raises(Refusal, match="is not built yet"):
        Protocol(shared_ffn_receive=False)


def test_the_refusal_of_an_unknown_switch_lists_the_known_ones() -> None:
    with pytest.raises(Refusal) as refusal:
        Protocol.parse("afdep+NO_SUCH=1")
    assert all(switch.env in str(refusal.value) for switch in SWITCHES)


@pytest.mark.parametrize("sms", [0, -1, 161])
def test_transport_sms_are_bounded(sms: int) -> None:
    with pytest.raises(Refusal, match=f"^transport SMs {sms} is outside 1 to 160$"):
        Protocol.parse("afdep", transport_sms=sms)
    assert Protocol(transport_sms=160).transport_sms == 160


# ---- resolution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "layout", "changes"),
    [
        ("afdep", LAYOUT, {}),
        ("afdep", SINGLE, {"single_ffn_prefix": True}),
        ("afdep+AFDEP_KEEP_ENTRY_BARRIERS=1", LAYOUT, {"entry_barriers": True}),
        ("afdep+AFDEP_UNION_NOTIFY=1", LAYOUT, {"union_counts": True}),
        ("afdep+AFDEP_ALL_RANK_EXIT=1", LAYOUT, {"exit": Exit.ALL_RANKS}),
        ("afdep+AFDEP_GRID_SYNC_EXIT=1", LAYOUT, {"exit": Exit.GRID}),
        (
            "afdep+AFDEP_GRID_SYNC_EXIT=1+AFDEP_ALL_RANK_EXIT=1",
            LAYOUT,
            {"exit": Exit.ALL_RANKS, "off": ("AFDEP_GRID_SYNC_EXIT",)},
        ),
        ("afdep+AFDEP_UNION_BUFFERS=1", LAYOUT, {"union_buffers": True}),
        ("afdep+AFDEP_UNION_REDUCE_PREFIX=1", LAYOUT, {"off": ("AFDEP_UNION_REDUCE_PREFIX",)}),
        ("afdep+AFDEP_UNION_REDUCE_PREFIX=1", SINGLE, {"single_ffn_prefix": False}),
        ("afdep+AFDEP_UNION_BUFFERS=1", SINGLE, {"union_buffers": True, "single_ffn_prefix": True}),
        ("afdep", Topology.parse("1A3F"), {}),
    ],
)
def test_what_a_switch_becomes(arm: str, layout: Topology, changes: dict[str, object]) -> None:
    assert Protocol.parse(arm).resolve(layout) == replace(SHIPPED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [LAYOUT, SINGLE], ids=lambda layout: layout.name)
def test_m2n_has_one_form_and_reports_its_switches_off(layout: Topology) -> None:
    assert Protocol.fastafd_m2n().resolve(layout) == BASELINE
    for switch in FREE:
        resolved = Protocol.parse(f"fastafd_m2n+{switch.env}=1").resolve(layout)
        assert resolved == replace(BASELINE, off=(switch.env,))
    every = Protocol("fastafd_m2n", **{switch.field: True for switch in FREE})
    assert every.resolve(layout).off == tuple(switch.env for switch in FREE)


def test_off_lists_each_switch_once() -> None:
    protocol = Protocol(all_rank_exit=True, grid_sync_exit=True, union_reduce_prefix=True)
    assert protocol.resolve(LAYOUT).off == ("AFDEP_GRID_SYNC_EXIT", "AFDEP_UNION_REDUCE_PREFIX")
    assert protocol.resolve(SINGLE).off == ("AFDEP_GRID_SYNC_EXIT",)


@pytest.mark.parametrize("preset", ["afdep", "fastafd_m2n"])
def test_several_domains_are_not_built(preset: str) -> None:
    with pytest.raises(Refusal, match="layout 2A2F spans 2 NVLink domains; only 1 is built"):
        Protocol(preset).resolve(Topology.parse("2A2F", gpus_per_domain=2))


def test_transport_sms_reach_the_resolution() -> None:
    assert Protocol(transport_sms=8).resolve(LAYOUT) == replace(SHIPPED, transport_sms=8)


# ---- agreement ------------------------------------------------------------------------------------------------------


def test_agreement_is_what_peers_see() -> None:
    names = [name for name, _ in SHIPPED.agreement()]
    wire = ["role_aware", "entry_barriers", "union_counts", "exit", "union_buffers", "topk_layout", "transport_sms"]
    assert names == wire
    assert dict(SHIPPED.agreement())["exit"] is Exit.PER_BLOCK


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        ({"role_aware": False}, False),
        ({"entry_barriers": True}, False),
        ({"union_counts": True}, False),
        ({"exit": Exit.GRID}, False),
        ({"union_buffers": True}, False),
        ({"transport_sms": 16}, False),
        ({"topk_layout": True}, False),
        ({"collect_view": True}, True),
        ({"single_ffn_prefix": True}, True),
        ({"off": ("AFDEP_GRID_SYNC_EXIT",)}, True),
    ],
)
def test_agreement_tells_wire_visible_changes_apart(change: dict[str, object], agrees: bool) -> None:
    other = replace(SHIPPED, **change)  # type: ignore[arg-type]
    assert (other.agreement() == SHIPPED.agreement()) is agrees
