"""Ranks, roles and domains: the forms a layout is written in, rank order, and what is refused."""

from __future__ import annotations

import pytest

from afdep_sim.errors import Refusal
from afdep_sim.topology import Role, Topology


@pytest.mark.parametrize("text", ["3A1F", "3A:1F", "1F3A", "1F:3A", " 3a:1f ", "3a1F"])
def test_parse_takes_either_order_with_or_without_a_colon(text: str) -> None:
    topology = Topology.parse(text)
    assert topology == Topology(attention_ranks=3, ffn_ranks=1)
    assert topology.name == "3A1F"
    assert Topology.parse(topology.name) == topology


@pytest.mark.parametrize("text", ["", "2A", "2A2A", "2F:2F", "2A-2F", "2A2F1A", "-2A2F", "2A 2F", "A2F2", "2.0A2F"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match=r"^layout .* is not of the form 2A2F, 2A:2F or 2F:2A$") as refusal:
        Topology.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["0A2F", "2A0F", "0F:0A"])
def test_both_roles_are_needed(text: str) -> None:
    with pytest.raises(Refusal, match="needs at least 1 Attention rank and 1 FFN rank"):
        Topology.parse(text)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(Refusal, match=r"layout -1A2F needs at least 1 Attention rank"):
        Topology(-1, 2)


def test_the_number_of_ranks_is_bounded() -> None:
    assert Topology.parse("1000A24F").ranks == 1024
    with pytest.raises(Refusal, match="layout 1000A25F has 1025 ranks, more than 1024"):
        Topology.parse("1000A25F")


def test_ffn_ranks_come_first() -> None:
    topology = Topology.parse("3A2F")
    assert topology.ranks == 5
    assert list(topology.ffn) == [0, 1]
    assert list(topology.attention) == [2, 3, 4]
    assert [topology.role(rank) for rank in range(5)] == [Role.FFN] * 2 + [Role.ATTENTION] * 3


def test_one_domain_is_the_default() -> None:
    topology = Topology.parse("2A2F")
    assert topology.gpus_per_domain == 4
    assert topology.domains == 1
    assert {topology.domain(rank) for rank in range(4)} == {0}
    assert topology == Topology.parse("2A2F", 4)
    assert hash(topology) == hash(Topology.parse("2A2F", 4))


def test_domains_are_filled_in_rank_order() -> None:
    topology = Topology.parse("4A2F", gpus_per_domain=2)
    assert topology.domains == 3
    assert [topology.domain(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_ranks_fill_whole_domains() -> None:
    with pytest.raises(Refusal, match="layout 2A2F has 4 ranks, not a multiple of 3 GPUs per domain"):
        Topology.parse("2A2F", 3)
    with pytest.raises(Refusal, match="not a multiple of 8 GPUs per domain"):
        Topology.parse("2A2F", 8)
    with pytest.raises(Refusal, match="gpus per domain -2 is below 1"):
        Topology.parse("2A2F", -2)


def test_a_refusal_is_a_value_error() -> None:
    assert issubclass(Refusal, ValueError)
