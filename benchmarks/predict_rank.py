"""One rank of the jobs that ``predict_benchmark.py`` measures.

    python benchmarks/predict_rank.py PLAN.json RANK

The plan is JSON: ``world_size``, ``host`` and ``port`` at which the ranks meet, ``output`` (folder of the
traces), ``interface`` of each rank (null: the network is not shaped), ``crowded`` (whether ranks share cores:
all begin their traced steps together, whatever their job), ``first_round`` and ``rounds``, the ``seconds``
within which these have to begin, ``steps``, and ``cases``. The cases take turns, in every other round in
reverse order, so that whatever else the machine does meets all of them alike. In each turn one step is
run first, and then ``steps`` are traced as ``CASE_rROUND``. A case with ``ranks`` divides all processes into
jobs of as many ranks, of which the first one's traces count. rounds.json is the number of finished rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.predict_workload import Job, times
from chakra_et.capture.tracer import ChakraTracer

WARM_UP = 3
"""Steps of each case before the first turn."""


class Rank:
    """This process: its jobs, made when a case first needs them, and its turns, taken with the others."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank, self.ranks = plan, rank, plan["world_size"]
        self.interface = (plan.get("interface") or {}).get(str(rank))
        self.store = dist.TCPStore(plan["host"], plan["port"], self.ranks, is_master=rank == 0)
        self.steps_begun = 0
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=self.ranks)
        self.groups = {
            size: [dist.new_group(range(at, at + size)) for at in range(0, self.ranks, size)]
            for size in sorted({case.get("ranks", self.ranks) for case in plan["cases"]} - {1, self.ranks})
        }
        self.jobs: dict[str, Job] = {}

    def run(self) -> None:
        """The plan's rounds that begin in time."""
        cases = self.plan["cases"]
        for case in cases:
            for _ in range(WARM_UP):
                self._ready(case).step()
        begin = time.monotonic()
        for number in range(self.plan["first_round"], self.plan["rounds"]):
            if self._most(time.monotonic() - begin) > self.plan["seconds"]:
                break
            for case in cases[:: -1 if number % 2 else 1]:
                self._turn(case, number)
            dist.barrier()
            if self.rank == 0:
                Path(self.plan["output"], "rounds.json").write_text(json.dumps(number + 1))

    def _turn(self, case: dict[str, Any], number: int) -> None:
        """Trace a case."""
        shape(self.interface, case.get("network"))
        job, name, steps = self._ready(case), f"{case['name']}_r{number}", self.plan["steps"]
        dist.barrier()
        with ChakraTracer(self.plan["output"], name, 0, 1, steps, self.rank, self.ranks) as tracer:
            for _ in range(1 + steps):
                job.step()
                if self.plan["crowded"]:
                    self._begin_together()
                tracer.step()
        shape(self.interface, None)

    def _begin_together(self) -> None:
        """Wait for all ranks, without a collective, which the traces would show."""
        self.steps_begun += 1
        arrived, go = f"arrived {self.steps_begun}", f"go {self.steps_begun}"
        if self.store.add(arrived, 1) == self.ranks:
            self.store.set(go, "")
        self.store.wait([go])

    def _ready(self, case: dict[str, Any]) -> Job:
        """The job of a case, with its threads and slow operators set."""
        torch.set_num_threads(case.get("threads", 1))
        slow = case.get("slow", {}) if self.rank in case.get("slow_ranks", range(self.ranks)) else {}
        times.update({operator: slow.get(operator, 1) for operator in times})
        return self._job(case)

    def _job(self, case: dict[str, Any]) -> Job:
        what = ("model", "accumulation", "wrapper", "bucket_mb", "ranks")
        key = json.dumps({name: case.get(name) for name in what})
        if key not in self.jobs:
            ranks = case.get("ranks", self.ranks)
            group = self.groups[ranks][self.rank // ranks] if ranks in self.groups else None
            self.jobs[key] = Job(case, group)
        return self.jobs[key]

    def _most(self, here: float) -> float:
        """The largest value of all ranks."""
        value = torch.tensor([here], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)


def shape(interface: str | None, rate: str | None) -> None:
    """Limit what this rank sends; None: no limit."""
    if interface is None:
        return
    subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], stderr=subprocess.DEVNULL)
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "128kb", "limit", "4mb"]
        subprocess.run(["tc", "qdisc", "add", "dev", interface, "root", *bucket], check=True)


def main() -> None:
    rank = Rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
