"""One rank of the jobs that ``predict_benchmark.py`` measures.

    python benchmarks/predict_rank.py PLAN.json RANK

The plan is JSON: ``world_size``, ``host`` and ``port`` at which the ranks meet, ``output`` (folder of the
traces), ``interface`` of each rank (null: the network is not shaped), ``crowded`` (whether ranks share cores:
all begin their traced steps together, whatever their job), ``first_round`` and ``rounds``, the ``seconds``
within which these have to begin, ``plain`` and ``active`` steps, and ``cases``. The cases take turns, so that
whatever else the machine does meets all of them alike; each time ``active`` steps are traced as
``CASE_rROUND``. A case with ``ranks`` divides all processes into jobs of as many ranks, of which the first
one's traces count.

turns_RANK.json lists the turns: ``case``, ``round``, ``slowdown`` of the slowest core just before or after
each traced step (see ``core_probe``), and ``steps_ms`` of the steps before, which aren't traced.
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

from benchmarks.core_probe import CoreProbe
from benchmarks.predict_workload import Job, times
from chakra_et.capture.tracer import ChakraTracer

WARM_UP = 3
"""Steps of each case before the first turn."""


class Rank:
    """This process: its jobs, made when a case first needs them, and its turns, taken with the others."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank, self.ranks = plan, rank, plan["world_size"]
        self.interface = (plan.get("interface") or {}).get(str(rank))
        self.probe = CoreProbe(os.sched_getaffinity(0))
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
        begin, path = time.monotonic(), Path(self.plan["output"], f"turns_{self.rank}.json")
        log = json.loads(path.read_text()) if self.plan["first_round"] else []
        for case in self.plan["cases"]:
            self._steps(case, WARM_UP)
        for number in range(self.plan["first_round"], self.plan["rounds"]):
            if self._most(time.monotonic() - begin) > self.plan["seconds"]:
                break
            for case in self.plan["cases"]:
                log.append(self._turn(case, number))
                path.write_text(json.dumps(log))

    def _turn(self, case: dict[str, Any], number: int) -> dict[str, Any]:
        """Trace a case: the entry of the log, the same on all ranks but for ``steps_ms``."""
        shape(self.interface, case.get("network"))
        steps_ms = self._steps(case, self.plan["plain"])
        job, active = self._job(case), self.plan["active"]
        probed: list[float] = []
        probes_us = []

        def probe() -> None:
            probed.append(self.probe.slowest_us())

        name = f"{case['name']}_r{number}"
        with ChakraTracer(self.plan["output"], name, 0, 1, active, self.rank, self.ranks) as tracer:
            for step in range(1 + active):
                job.step(probe)
                probe()
                if step:
                    probes_us.append(max(probed))
                del probed[:-1]  # the last one is also the first of the next step
                if self.plan["crowded"]:
                    self._begin_together()
                tracer.step()
        shape(self.interface, None)
        most = torch.tensor(probes_us)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return {"case": case["name"], "round": number, "probe_us": most.tolist(), "steps_ms": steps_ms}

    def _begin_together(self) -> None:
        """Wait for all ranks, without a collective, which the traces would show."""
        self.steps_begun += 1
        arrived, go = f"arrived {self.steps_begun}", f"go {self.steps_begun}"
        if self.store.add(arrived, 1) == self.ranks:
            self.store.set(go, "")
        self.store.wait([go])

    def _steps(self, case: dict[str, Any], count: int) -> list[float]:
        """Run untraced steps of a case; their times, ms."""
        job = self._job(case)
        torch.set_num_threads(case.get("threads", 1))
        slow = case.get("slow", {}) if self.rank in case.get("slow_ranks", range(self.ranks)) else {}
        times.update({operator: slow.get(operator, 1) for operator in times})
        dist.barrier()
        began = [time.perf_counter()]
        for _ in range(count):
            job.step()
            began.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in zip(began, began[1:], strict=False)]

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
