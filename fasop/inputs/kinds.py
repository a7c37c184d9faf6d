"""What the values in files mean and how large they can be: types that msgspec checks.

A description and an example are what the sentence about a wrong value shows.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 10_000_000  # of any count: what is above is a slip
MOST_LAYERS = 500  # the search grows with the square of the layers
MOST_SEQUENCES = 100_000  # of a step: with more, search and simulation take too long
MOST_NODES = 10_000  # of one GPU type
MOST_GPUS = 1024  # of one node

Count = Annotated[int, Meta(ge=1, le=MOST)]
CountOrZero = Annotated[int, Meta(ge=0, le=MOST)]
Layers = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Sequences = Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)]
Nodes = Annotated[int, Meta(ge=0, le=MOST_NODES)]
NodeSize = Annotated[int, Meta(ge=0, le=MOST_GPUS)]
Name = Annotated[str, Meta(min_length=1)]

Memory = Annotated[
    float, Meta(ge=0.1, le=1024, description="GiB of one GPU", examples=["an 80 GiB GPU is 80"])
]
Reserved = Annotated[float, Meta(ge=0, le=1024, description="GiB of one GPU", examples=["4.8"])]
HourlyPrice = Annotated[float, Meta(ge=0, le=10_000, description="$ per node and hour", examples=["32.77"])]
Bandwidth = Annotated[
    float, Meta(ge=1e7, le=1e18, description="bit/s", examples=["200 Gbit/s is 200e9, 25 GB/s is 200e9"])
]
BandwidthOrZero = Annotated[float, Meta(ge=0, le=1e18, description="bit/s")]
Latency = Annotated[float, Meta(ge=0, le=1, description="seconds per message", examples=["10 µs is 1e-5"])]
Speed = Annotated[float, Meta(ge=1e-3, le=1e3, description="times as fast", examples=["2.2"])]
MessageSize = Annotated[float, Meta(ge=1, le=1e12, description="bytes per message", examples=["1 MB is 1e6"])]
StepSeconds = Annotated[float, Meta(ge=1e-6, le=1e6, description="seconds per step", examples=["1.402"])]

# Of files that commands write; their bounds keep what is computed of them finite.
SecondsPerUnit = Annotated[float, Meta(ge=0, le=1e4)]
UnitBytes = Annotated[float, Meta(ge=0, le=1e15)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]
FactorOrZero = Annotated[float, Meta(ge=0, le=1e6)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
SomeSeconds = Annotated[float, Meta(gt=0, le=1e12)]
Gib = Annotated[float, Meta(ge=0, le=1e12)]
Price = Annotated[float, Meta(ge=0, le=1e100)]
