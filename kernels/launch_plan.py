"""How the tree-attention kernels are launched: a pure function of shapes and of what a device has.

Neither looks at a GPU nor compiles: `aot` compiles every configuration that can be chosen here, without a GPU, and the
table in docs/kernels.md shows what each takes. Legend as in `tree_attention`; M = N·G rows share a key head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.ancestor_bits import WORD_BITS

MAX_NODES = 2 * WORD_BITS
SIZES = (64, 80, 96, 128, 256)
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
# What one program may take of a processor's shared memory, less what a driver keeps of it; and all that it has.
_BLOCK_LIMITS = {"sm80": 163, "sm86": 99, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}
MERGE_AT_ONCE = 16
# A share of fewer tiles costs more to merge than it saves.
_TILES_A_SPLIT = 4
_MAX_SPLITS = 128


@dataclass(frozen=True)
class Device:
    """What a launch depends on: the architecture ("sm90"), its processors, and the shared memory a program may take."""

    arch: str
    processors: int
    shared_bytes: int

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether a matrix product reads its operands from shared memory (Hopper, and Blackwell of data centres)."""
        return self.arch in ("sm90", "sm100")

    @classmethod
    def of(cls, arch: str, processors: int) -> Device:
        """One of the architectures compiled for; ValueError for another."""
        if arch not in _BLOCK_LIMITS:
            raise ValueError(f"no shared-memory limit is known for {arch}: one of {sorted(_BLOCK_LIMITS)}")
        return cls(arch, processors, _BLOCK_LIMITS[arch] * 1024)


@dataclass(frozen=True)
class Shape:
    """One call. `slots` bounds prefix and tree together: no more is known of lengths without waiting for the GPU."""

    batch: int
    heads: int
    kv_heads: int
    nodes: int
    size: int
    slots: int
    dtype: str

    def __post_init__(self) -> None:
        """ValueError for what no kernel is made for."""
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a tree of {self.nodes} nodes: 1 to {MAX_NODES} have a place in two words of ancestors")
        if self.size not in SIZES:
            raise ValueError(f"heads of size {self.size}: one of {SIZES}")
        if self.dtype not in BYTES:
            raise ValueError(f"{self.dtype}: one of {sorted(BYTES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide into {self.kv_heads} key heads")

    @property
    def rows(self) -> int:
        """Rows that share a key head."""
        return self.nodes * (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Config:
    """One compiled kernel. `general`: with a sliding window or soft-cap."""

    dtype: str
    size: int
    block_m: int
    block_n: int
    block_d: int
    general: bool
    warps: int
    stages: int

    def __str__(self) -> str:
        tiles = f"{self.block_m}x{self.block_n}x{self.block_d}"
        kind = f"{self.dtype} d{self.size}{' general' * self.general}"
        return f"{kind} {tiles} warps {self.warps} stages {self.stages}"


@dataclass(frozen=True)
class LaunchPlan:
    """Grid (splits, kv_heads · row_blocks, batch) of `attend` with this configuration, then `merge` if splits > 1."""

    config: Config
    splits: int
    row_blocks: int


def plan_launch(shape: Shape, device: Device, *, general: bool = False) -> LaunchPlan:
    """The launch for a call on a device."""
    config = configure(shape.dtype, shape.size, shape.rows, device, general=general)
    row_blocks = -(-shape.rows // config.block_m)
    programs = shape.batch * shape.kv_heads * row_blocks
    return LaunchPlan(config, _splits(programs, -(-shape.slots // config.block_n), device.processors), row_blocks)


def configure(dtype: str, size: int, rows: int, device: Device, *, general: bool) -> Config:
    """The kernel for so many rows: the smallest tile that holds them all, as long as its accumulator fits registers."""
    block_d = block_of(size)
    full = dtype == "fp32"
    accumulated = 64 * 128 if full else 64 * 256
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128, accumulated // block_d)
    # Before Hopper both operands of a product are held in registers, and in full precision everywhere.
    crowded = block_d == 256 or (block_m >= 64 and not device.multiplies_from_shared)
    block_n = 16 if full else 32 if crowded else 64
    warps = 8 if block_m == 128 or block_m * block_d >= accumulated else 4
    tile = 2 * block_n * block_d * BYTES[dtype]
    fixed = block_m * block_d * BYTES[dtype]
    stages = max(n for n in ((2, 1) if full else (3, 2, 1)) if n == 1 or n * tile + fixed <= device.shared_bytes)
    return Config(dtype, size, block_m, block_n, block_d, general, warps, stages)


def block_of(size: int) -> int:
    """The head size that tiles have: a power of two."""
    return max(64, 1 << (size - 1).bit_length())


def configs(device: Device) -> Iterator[Config]:
    """Every configuration that `plan_launch` can choose on a device, each once."""
    rows = (1, 32, 64, 128)
    found = (
        configure(dtype, size, count, device, general=general)
        for dtype, size, general, count in itertools.product(BYTES, SIZES, (False, True), rows)
    )
    yield from dict.fromkeys(found)


def _splits(programs: int, tiles: int, processors: int) -> int:
    """Shares of the keys: enough to occupy the processors, with the last wave as full as any, and none too small.

    The fewest whose efficiency, the full part of their waves, comes within 15 % of the best (FlashAttention's rule).
    """
    most = max(1, min(_MAX_SPLITS, tiles // _TILES_A_SPLIT))
    if programs >= 0.8 * processors:
        return 1
    efficiency = {}
    for splits in range(1, most + 1):
        waves = programs * splits / processors
        efficiency[splits] = waves / -(-programs * splits // processors)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)
