"""Ranks, roles and NVLink domains (record sections 5 and 6, upstream section 1).

Rank order is FFN ranks [0, F), then Attention ranks [F, R), in every arm. Domains are filled in rank order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from afdep_sim.errors import Refusal, whole, word

MAX_RANKS = 1024
"""Upstream section 1: R <= 1024, the size of the workspace's rank arrays."""


class Role(Enum):
    """What a rank owns: experts (FFN) or tokens (ATTENTION)."""

    FFN = "ffn"
    ATTENTION = "attention"


@dataclass(frozen=True)
class Topology:
    """A layout of `attention_ranks` + `ffn_ranks` GPUs in NVLink domains of `gpus_per_domain` GPUs.

    `gpus_per_domain=0` puts every rank into one domain. Raises `Refusal` for a layout without both roles, with
    more than 1,024 ranks, or with ranks that do not fill whole domains.
    """

    attention_ranks: int
    ffn_ranks: int
    gpus_per_domain: int = 0

    def __post_init__(self) -> None:
        for name in ("attention_ranks", "ffn_ranks", "gpus_per_domain"):
            object.__setattr__(self, name, whole(name.replace("_", " "), getattr(self, name)))
        if self.attention_ranks < 1 or self.ffn_ranks < 1:
            raise Refusal(
                f"layout {self.attention_ranks}A{self.ffn_ranks}F needs at least 1 Attention rank and 1 FFN rank"
            )
        if self.ranks > MAX_RANKS:
            raise Refusal(f"layout {self.name} has {self.ranks} ranks, more than {MAX_RANKS}")
        if self.gpus_per_domain < 0:
            raise Refusal(f"gpus per domain {self.gpus_per_domain} is below 1")
        if self.gpus_per_domain == 0:
            object.__setattr__(self, "gpus_per_domain", self.ranks)
        if self.ranks % self.gpus_per_domain:
            raise Refusal(
                f"layout {self.name} has {self.ranks} ranks, not a multiple of {self.gpus_per_domain} GPUs per domain"
            )

    @classmethod
    def parse(cls, text: str, gpus_per_domain: int = 0) -> Topology:
        """'2A2F', '2A:2F', '2F2A' or '2F:2A' -> Topology; anything else is a `Refusal`."""
        match = re.fullmatch(r"([0-9]{1,6})([AF]):?([0-9]{1,6})([AF])", word("layout", text).strip(), re.IGNORECASE)
        if not match or match[2].upper() == match[4].upper():
            raise Refusal(f"layout {text!r} is not of the form 2A2F, 2A:2F or 2F:2A")
        counts = {match[2].upper(): int(match[1]), match[4].upper(): int(match[3])}
        return cls(counts["A"], counts["F"], gpus_per_domain)

    @property
    def name(self) -> str:
        return f"{self.attention_ranks}A{self.ffn_ranks}F"

    @property
    def ranks(self) -> int:
        return self.attention_ranks + self.ffn_ranks

    @property
    def domains(self) -> int:
        return self.ranks // self.gpus_per_domain

    @property
    def ffn(self) -> range:
        """The FFN ranks."""
        return range(self.ffn_ranks)

    @property
    def attention(self) -> range:
        """The Attention ranks."""
        return range(self.ffn_ranks, self.ranks)

    def role(self, rank: int) -> Role:
        return Role.FFN if rank < self.ffn_ranks else Role.ATTENTION

    def domain(self, rank: int) -> int:
        """The NVLink domain that holds `rank` (domains are filled in rank order)."""
        return rank // self.gpus_per_domain
