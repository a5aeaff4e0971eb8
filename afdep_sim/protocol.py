"""Every switch of the protocol in one frozen dataclass, the names users write, and what a topology makes of them.

An *arm* is a preset (`afdep`, `fastafd_m2n`), then `+NAME=VALUE` for the record's control variables, `+COLLECT_VIEW`
and `+dev:NAME`. Names that are unknown or not built yet are refused, never ignored (design section 6).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from afdep_sim.errors import Refusal, whole, word
from afdep_sim.errors import switch as truth
from afdep_sim.topology import Topology

PRESETS = ("afdep", "fastafd_m2n")


class Exit(Enum):
    """How a phase ends (record section 3)."""

    PER_BLOCK = "per_block"
    """Each sending block releases its own arrival; receivers wait for round x blocks."""
    GRID = "grid"
    """The sending grid synchronises, block 0 releases one arrival per peer."""
    ALL_RANKS = "all_ranks"
    """Upstream's exit: flush, grid synchronisation, all-rank barrier."""


@dataclass(frozen=True)
class Switch:
    """One AFDEP_* control: the `Protocol` field it sets, its section of the record, and the states that are built."""

    env: str
    field: str
    section: str
    built: tuple[bool, ...] = (False, True)


SWITCHES = (
    Switch("AFDEP_KEEP_ENTRY_BARRIERS", "keep_entry_barriers", "1"),
    Switch("AFDEP_UNION_NOTIFY", "union_notify", "2"),
    Switch("AFDEP_ALL_RANK_EXIT", "all_rank_exit", "3"),
    Switch("AFDEP_GRID_SYNC_EXIT", "grid_sync_exit", "3"),
    Switch("AFDEP_UNION_BUFFERS", "union_buffers", "4"),
    Switch("AFDEP_UNION_REDUCE_PREFIX", "union_reduce_prefix", "10"),
    Switch("AFDEP_SHARED_FFN_RECEIVE", "shared_ffn_receive", "15", built=(True,)),
)
SWITCH_OF_ENV = {switch.env: switch for switch in SWITCHES}
TOKENS = {"COLLECT_VIEW": "collect_view", "dev:topk_layout": "topk_layout"}
"""Bare words of an arm -> the field they set: section 13's view, and the top-k layout of the combine inbox where the
rank layout would do (a deviation for tests)."""


@dataclass(frozen=True)
class Protocol:
    """One arm. The defaults are afdEP-comm as far as it is built; `Protocol.afdep()` and `.fastafd_m2n()` name the two.

    The boolean fields are the record's control variables: False is the shipped protocol, True restores what the
    section replaced. `collect_view` (section 13): with one FFN rank the combined rows are a view of the inbox.
    `topk_layout`: one combine region per top-k lane even where there is one per rank. `transport_sms` is the grid of
    dispatch and combine. `shared_ffn_receive` has only its True state so far: the section 15 receive kernel is a
    later addition.
    """

    preset: str = "afdep"
    keep_entry_barriers: bool = False
    union_notify: bool = False
    all_rank_exit: bool = False
    grid_sync_exit: bool = False
    union_buffers: bool = False
    union_reduce_prefix: bool = False
    shared_ffn_receive: bool = True
    collect_view: bool = False
    topk_layout: bool = False
    transport_sms: int = 24

    def __post_init__(self) -> None:
        object.__setattr__(self, "transport_sms", whole("transport SMs", self.transport_sms))
        for name in (*(switch.field for switch in SWITCHES), *TOKENS.values()):
            truth(name, getattr(self, name))
        if self.preset not in PRESETS:
            raise Refusal(f"protocol preset {self.preset!r} is not one of {', '.join(PRESETS)}")
        if not 1 <= self.transport_sms <= 160:
            raise Refusal(f"transport SMs {self.transport_sms} is outside 1 to 160")
        for switch in SWITCHES:
            value = getattr(self, switch.field)
            if value not in switch.built:
                raise Refusal(
                    f"{switch.env}={int(value)} (record section {switch.section}) is not built yet; "
                    f"only {switch.env}={int(switch.built[0])} is"
                )

    @classmethod
    def afdep(cls, **fields: bool | int) -> Protocol:
        """The record's 1.0.0 dense protocol as far as it is built (section 15's receive kernel is not)."""
        return cls("afdep", **fields)  # type: ignore[arg-type]

    @classmethod
    def fastafd_m2n(cls, transport_sms: int = 24) -> Protocol:
        """FastAFD's DeepEP M2N: the same kernels unspecialised, dummy experts on Attention (upstream section 13)."""
        return cls("fastafd_m2n", transport_sms=transport_sms)

    @classmethod
    def parse(cls, arm: str, transport_sms: int = 24) -> Protocol:
        """'afdep+AFDEP_ALL_RANK_EXIT=1' -> Protocol. Refuses unknown presets, names and values."""
        preset, *parts = word("arm", arm).strip().split("+")
        protocol = cls(preset, transport_sms=transport_sms)
        return protocol.with_switches(parts)

    def with_switches(self, parts: list[str]) -> Protocol:
        """This protocol with `NAME=VALUE` switches set; M2N has none of them and keeps its one form."""
        changes: dict[str, bool] = {}
        for part in parts:
            if part in TOKENS:
                changes[TOKENS[part]] = True
                continue
            name, _, value = part.partition("=")
            switch = SWITCH_OF_ENV.get(name)
            if switch is None:
                known = ", ".join([*SWITCH_OF_ENV, *TOKENS])
                raise Refusal(f"switch {part!r} is unknown or not built yet; the switches are {known}")
            if value not in ("0", "1"):
                raise Refusal(f"switch {part!r} takes {name}=0 or {name}=1")
            changes[switch.field] = value == "1"
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def arm(self) -> str:
        """The arm string that `parse` reads back."""
        base = type(self)(self.preset)
        parts = [
            f"{switch.env}={int(getattr(self, switch.field))}"
            for switch in SWITCHES
            if getattr(self, switch.field) != getattr(base, switch.field)
        ]
        parts += [token for token, field in TOKENS.items() if getattr(self, field)]
        return "+".join([self.preset, *parts])

    def resolve(self, topology: Topology) -> Resolved:
        """What runs on `topology`: refuses what no text exists for, and lists the switches that have no effect."""
        if topology.domains != 1:
            raise Refusal(
                f"layout {topology.name} spans {topology.domains} NVLink domains; only 1 is built"
            )
        roles = self.preset == "afdep"
        off = []
        if not roles:
            off = [s.env for s in SWITCHES if s.built != (True,) and getattr(self, s.field)]
        elif self.all_rank_exit and self.grid_sync_exit:
            off = ["AFDEP_GRID_SYNC_EXIT"]
        if roles and self.union_reduce_prefix and topology.ffn_ranks > 1:
            off.append("AFDEP_UNION_REDUCE_PREFIX")
        if self.collect_view and not (roles and topology.ffn_ranks == 1):
            off.append("COLLECT_VIEW")
        exit_ = Exit.PER_BLOCK
        if not roles or self.all_rank_exit:
            exit_ = Exit.ALL_RANKS
        elif self.grid_sync_exit:
            exit_ = Exit.GRID
        return Resolved(
            role_aware=roles,
            entry_barriers=not roles or self.keep_entry_barriers,
            union_counts=not roles or self.union_notify,
            exit=exit_,
            union_buffers=not roles or self.union_buffers,
            collect_view=roles and self.collect_view and topology.ffn_ranks == 1,
            topk_layout=self.topk_layout,
            single_ffn_prefix=roles and topology.ffn_ranks == 1 and not self.union_reduce_prefix,
            transport_sms=self.transport_sms,
            off=tuple(off),
        )


@dataclass(frozen=True)
class Resolved:
    """A protocol on one topology: what the plan and the text read. `off` names switches without effect here."""

    role_aware: bool
    entry_barriers: bool
    union_counts: bool
    exit: Exit
    union_buffers: bool
    collect_view: bool
    topk_layout: bool
    single_ffn_prefix: bool
    transport_sms: int
    off: tuple[str, ...]

    def agreement(self) -> tuple[tuple[str, object], ...]:
        """The wire-visible part every rank must share: (name, value) pairs in field order."""
        local = ("collect_view", "single_ffn_prefix", "off")
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in local)
