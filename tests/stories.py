"""Events of small runs, told by hand: the raw material of the tests of traces and pictures."""

from __future__ import annotations

from afdep_sim.kernels import phases as ph
from afdep_sim.run import AgentEvent, Events, Join, LaunchEvent, Mark
from afdep_sim.topology import Topology

ONE_EACH = Topology(1, 1)
PERIOD_NS = 1000.0
FFN, ATTENTION = 0, 1


class Story:
    """Writes events down as one would tell them; every time is shifted by `shift_ns`."""

    def __init__(self, ranks: int = 2) -> None:
        self.events = Events(ends_ns=[[] for _ in range(ranks)])
        self.shift_ns = 0.0
        self.exchange = 0

    def launch(self, rank: int, kernel: str, start_ns: float, end_ns: float, warps: int = 8) -> None:
        at = self.shift_ns
        event = LaunchEvent(rank, self.exchange, kernel, 1, warps, at + start_ns, at + end_ns)
        self.events.launches.append(event)

    def agent(self, warp: int, label: str, start_ns: float, end_ns: float, *marks: tuple[int, float]) -> int:
        """An agent of block 0 of the latest launch; its index."""
        at, agent = self.shift_ns, len(self.events.agents)
        launch = len(self.events.launches) - 1
        self.events.agents.append(AgentEvent(launch, 0, warp, label, at + start_ns, at + end_ns))
        self.events.marks += [Mark(agent, phase, at + time_ns) for phase, time_ns in marks]
        return agent

    def join(self, agent: int, time_ns: float, kind: str, source: int, source_ns: float) -> None:
        at = self.shift_ns
        self.events.joins.append(Join(agent, at + time_ns, kind, source, at + source_ns))


def exchanges(count: int = 2) -> Events:
    """`count` equal exchanges of 1A1F, one every PERIOD_NS: signals across ranks, a block join, programmatic edges."""
    story = Story()
    last = {FFN: -1, ATTENTION: -1}
    for n in range(count):
        story.exchange, story.shift_ns = n, n * PERIOD_NS
        story.launch(ATTENTION, "dispatch", 0, 300)
        notify = story.agent(
            0,
            "notify",
            0,
            300,
            (ph.DISPATCH_START, 10),
            (ph.DISPATCH_COUNT, 20),
            (ph.DISPATCH_EXIT, 100),
            (ph.DISPATCH_END, 290),
        )
        payload = story.agent(
            4, "payload", 0, 280, (ph.DISPATCH_START, 10), (ph.DISPATCH_PAYLOAD, 30), (ph.DISPATCH_EXIT, 270)
        )
        for agent in (notify, payload):
            story.join(agent, 0, "stream", last[ATTENTION], -50)
        story.join(notify, 280, "block", payload, 280)

        story.launch(FFN, "dispatch", 5, 400)
        receive = story.agent(
            0, "notify", 5, 400, (ph.DISPATCH_START, 15), (ph.DISPATCH_ARRIVAL, 50), (ph.DISPATCH_END, 360)
        )
        story.join(receive, 5, "stream", last[FFN], -300)
        story.join(receive, 350, "signal", notify, 285)
        story.launch(FFN, "copy_epilogue", 362, 520)
        rows = story.agent(0, "rows", 362, 520, (ph.COPY_START, 365), (ph.COPY_ROWS, 402))
        story.join(rows, 362, "stream", last[FFN], -300)
        story.join(rows, 402, "primary", receive, 400)
        story.launch(FFN, "combine", 530, 700)
        combine = story.agent(
            0, "rows", 530, 700, (ph.COMBINE_START, 535), (ph.COMBINE_ROWS, 540), (ph.COMBINE_EXIT, 650)
        )
        story.join(combine, 530, "stream", rows, 520)

        story.launch(ATTENTION, "combine", 310, 800)
        collect = story.agent(
            0, "collect", 310, 800, (ph.COMBINE_START, 315), (ph.COMBINE_ARRIVAL, 320), (ph.COMBINE_END, 770)
        )
        story.join(collect, 310, "stream", notify, 300)
        story.join(collect, 760, "signal", combine, 690)
        story.launch(ATTENTION, "reduce_epilogue", 780, 950)
        reduce = story.agent(0, "rows", 780, 950, (ph.REDUCE_START, 782), (ph.REDUCE_ROWS, 801))
        story.join(reduce, 780, "stream", notify, 300)
        story.join(reduce, 801, "primary", collect, 800)
        last = {FFN: combine, ATTENTION: reduce}
        story.events.ends_ns[FFN].append(story.shift_ns + 705)
        story.events.ends_ns[ATTENTION].append(story.shift_ns + 960)
    return story.events
