"""The settings of ``_00_conf.sh`` as one value, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_lm.errors import SettingsError
from megatron_lm.settings.sizes import MODELS, Size

PRECISIONS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Settings:
    """What of ``_00_conf.sh`` the training needs, under the same names in small letters."""

    homogeneous_cluster: bool = True
    model: str = "xl"
    nproc_per_node: int = 4
    nnodes: int = 8
    world_size: int = 32
    global_batch_size: int = 64
    micro_batch_size: int = 1
    tensor_mp_size: int = 1
    dp_size: int = 4
    pipeline_mp_size: int = 8
    partition: str = "0-11-8-8-8-8-5-0"
    train_iters: int = 50
    log_interval: int = 10
    precision: str = "fp16"
    lr: float = 1.5e-4
    lr_decay_iters: int = 320_000
    lr_warmup_fraction: float = 0.01
    seed: int = 1234
    data_path: str = ""
    split: str = "100,0,0"
    save: str = ""
    save_interval: int = 0
    load: str = ""
    profile: bool = False
    profile_chakra: bool = False
    trace_output_dir: str = "../outputs"
    nsys: bool = False
    ncu: bool = False
    master_port: int = 6000
    master_nnodes: int = 1
    cpus_per_task: int = 8
    reload_container: bool = False

    @property
    def size(self) -> Size:
        return MODELS[self.model]

    @property
    def layers(self) -> tuple[int, ...]:
        """Transformer layers of each pipeline stage."""
        return tuple(int(part) for part in self.partition.split("-"))

    @property
    def layout(self) -> str:
        """The partition as megatron-core writes it: E embedding, t layer, L loss, | between stages."""
        stages = [f"t*{layers}" if layers else "" for layers in self.layers]
        return f"E{stages[0]}" + "".join(f"|{stage}" for stage in stages[1:]) + "L"

    @property
    def micro_batches(self) -> int:
        """Of each data-parallel rank, in one iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: a multiple of 128, which any number of tensor-parallel ranks can share."""
        return -(-self.size.vocabulary // 128) * 128

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read and check. Raises ``SettingsError`` with the setting at fault and what would fit."""
        values = {}
        for field in fields(cls):
            text = environment.get(field.name.upper())
            if text is not None:
                values[field.name] = _READ[field.type](field.name.upper(), text)
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ``SettingsError`` where the settings don't fit each other."""
        if self.model not in MODELS:
            raise SettingsError(f"MODEL={self.model}: no such model; choose from {', '.join(MODELS)}.")
        if self.precision not in PRECISIONS:
            raise SettingsError(f"PRECISION={self.precision}: choose from {', '.join(PRECISIONS)}.")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingsError(f"{name.upper()}={getattr(self, name)}: give at least 1.")
        if not 1 <= self.master_port <= 65_535:
            raise SettingsError(f"MASTER_PORT={self.master_port}: give a port from 1 to 65535.")
        if not (0 < self.lr < 1 and 0 <= self.lr_warmup_fraction < 1):
            raise SettingsError(
                f"LR={self.lr:g}, LR_WARMUP_FRACTION={self.lr_warmup_fraction:g}: both lie between 0 and 1."
            )
        self._check_ranks()
        self._check_partition()
        size, tensor = self.size, self.tensor_mp_size
        if size.heads % tensor:
            fit = _divisors(size.heads)
            raise SettingsError(
                f"TENSOR_MP_SIZE={tensor}: so many can't share {size.heads} attention heads; {fit} fit."
            )
        each = self.micro_batch_size * self.dp_size
        if self.global_batch_size % each:
            near = max(self.global_batch_size // each, 1) * each
            raise SettingsError(
                f"GLOBAL_BATCH_SIZE={self.global_batch_size}: must be a multiple of MICRO_BATCH_SIZE × "
                f"DP_SIZE = {each}; {near} would fit."
            )
        if not self.homogeneous_cluster and not self.master_nnodes < self.nnodes:
            raise SettingsError(
                f"MASTER_NNODES={self.master_nnodes}: of {self.nnodes} nodes (NNODES) some must be left for "
                "the slave job; 1 would fit where there are two nodes or more."
            )
        _check_split(self.split)

    def _check_ranks(self) -> None:
        launched = self.nproc_per_node * self.nnodes
        if self.world_size != launched:
            raise SettingsError(
                f"WORLD_SIZE={self.world_size}: NPROC_PER_NODE × NNODES = {self.nproc_per_node} × "
                f"{self.nnodes} = {launched}; leave WORLD_SIZE out, or set it to {launched}."
            )
        dp, tensor, pipeline = self.dp_size, self.tensor_mp_size, self.pipeline_mp_size
        if dp * tensor * pipeline != self.world_size:
            rest, over = divmod(self.world_size, tensor * pipeline)
            fit = f"DP_SIZE={rest} would fit" if not over else f"{tensor * pipeline} does not divide it"
            raise SettingsError(
                f"WORLD_SIZE={self.world_size} is not DP_SIZE × TENSOR_MP_SIZE × PIPELINE_MP_SIZE = {dp} × "
                f"{tensor} × {pipeline} = {dp * tensor * pipeline}; {fit}."
            )

    def _check_partition(self) -> None:
        stages, layers = self.pipeline_mp_size, self.size.layers
        parts = self.partition.split("-")
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        fit = "-".join(map(str, even)) + " would fit"
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise SettingsError(f"PARTITION={self.partition}: give the layers of each stage; {fit}.")
        if len(parts) != stages:
            raise SettingsError(
                f"PARTITION={self.partition} has {len(parts)} stages, PIPELINE_MP_SIZE is {stages}; {fit}."
            )
        if sum(self.layers) != layers:
            raise SettingsError(
                f"PARTITION={self.partition} adds up to {sum(self.layers)} layers, model {self.model} has "
                f"{layers}; {fit}."
            )
        if 0 in self.layers[1:-1]:
            stage = self.layers.index(0, 1)
            raise SettingsError(
                f"PARTITION={self.partition}: stage {stage} has nothing to do; only the first, which has the "
                f"embedding, and the last, which has the loss, can be without layers; {fit}."
            )


_AT_LEAST_ONE = (
    "nproc_per_node", "nnodes", "world_size", "global_batch_size", "micro_batch_size", "tensor_mp_size",
    "dp_size", "pipeline_mp_size", "train_iters", "log_interval", "lr_decay_iters", "master_nnodes",
    "cpus_per_task",
)  # fmt: skip


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise SettingsError(f"{name}={text}: give a whole number.")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{name}={text}: give a number.") from None


def _truth(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise SettingsError(f"{name}={text}: give true or false.")
    return text == "true"


def _text(name: str, text: str) -> str:
    return text


_READ = {"int": _whole, "float": _number, "bool": _truth, "str": _text}


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def _check_split(text: str) -> None:
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or not parts[0]:
        raise SettingsError(
            f"SPLIT={text}: give the shares of training, validation and test, such as 100,0,0."
        )
