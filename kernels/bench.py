"""What the tree-attention kernel gives on this GPU: `python -m kernels.bench [--json FILE] [--minutes 4]`.

Correctness first: every shape is compared with the definition before it is timed, and a difference ends it. Then, in
one process and in turns: this kernel, merge included; transformers' way (its SDPA, keys repeated, a dense mask); the
engine's way without the kernel (heads folded into nodes, a dense mask); FlexAttention under the tree mask; FlashInfer
with a custom mask, where installed. Each call is one CUDA graph, the L2 cache is flushed before each replay, and the
median of the replays counts. Beside them stands the floor: the larger of the cache's bytes at this GPU's measured copy
bandwidth and of 4·B·Hq·N·S·D at its measured matrix-product rate.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F

from kernels import reference
from kernels.ancestor_bits import mask_from_words, tree_mask, words_from_parents
from kernels.compaction import compact_cache
from kernels.launch_plan import Device, Shape, plan_launch
from kernels.tree_attention import attend_under

_REPLAYS = 25
# Of the largest value. A mask that is ignored must show at four times as much.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """One attention call: `prefix` tokens before the tree in each of `batch` rows."""

    batch: int
    heads: int
    kv_heads: int
    nodes: int
    size: int
    prefix: int
    dtype: str = "bfloat16"

    @property
    def tree_end(self) -> int:
        return self.prefix + self.nodes

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.tree_end * self.size * 2

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.nodes * self.tree_end * self.size


# The most telling first: what does not fit the time is left out, and named.
CALLS = (
    Call(1, 32, 8, 26, 128, 8192),
    Call(1, 32, 8, 26, 128, 4096),
    Call(1, 32, 32, 26, 128, 4096),
    Call(8, 32, 8, 26, 128, 8192),
    Call(1, 32, 8, 16, 128, 32768),
    Call(1, 28, 4, 14, 128, 8192),
    Call(1, 32, 8, 64, 128, 8192),
    Call(1, 32, 8, 1, 128, 8192),
    Call(1, 32, 32, 64, 128, 8192),
    Call(32, 32, 8, 16, 128, 2048),
    Call(1, 9, 3, 16, 64, 2048),
    Call(1, 32, 8, 128, 128, 8192),
    Call(1, 16, 8, 26, 256, 8192),
    Call(1, 32, 32, 26, 80, 4096),
    Call(1, 32, 8, 26, 128, 512),
    Call(4, 32, 8, 26, 128, 8192, "float16"),
)


def plan_row(call: Call, device: Device) -> dict[str, Any]:
    """What a call moves on a device, in bytes, and how it is launched: needs no GPU."""
    shape = Shape(call.batch, call.heads, call.kv_heads, call.nodes, call.size, call.tree_end, "bf16")
    plan = plan_launch(shape, device)
    # Keys and values are then read once, written repeated, and read again.
    repeated = call.heads > call.kv_heads and call.nodes > 1
    parts = plan.splits * call.batch * call.heads * call.nodes * (call.size + 1) * 4 if plan.splits > 1 else 0
    return {
        "config": str(plan.config),
        "programs": plan.splits * call.kv_heads * plan.row_blocks * call.batch,
        "splits": plan.splits,
        "cache_bytes": call.cache_bytes * plan.row_blocks,
        "part_bytes": 2 * parts,
        "sdpa_bytes": call.cache_bytes * (1 + 2 * call.heads // call.kv_heads if repeated else 1),
    }


def print_plan(device: Device) -> None:
    """`plan_row` of every call as a table."""
    print("| B Hq/Hkv N D prefix | launch | programs | splits | cache, MB | parts, MB | transformers' SDPA, MB |")
    print("|---" * 7 + "|")
    for call in CALLS:
        row = plan_row(call, device)
        name = f"{call.batch} {call.heads}/{call.kv_heads} {call.nodes} {call.size} {call.prefix}"
        moved = (f"{row[what] / 1e6:.1f}" for what in ("cache_bytes", "part_bytes", "sdpa_bytes"))
        print(f"| {name} | {row['config']} | {row['programs']} | {row['splits']} | {' | '.join(moved)} |")


class Setting:
    """Tensors of a call, and the ways to compute it."""

    def __init__(self, call: Call) -> None:
        self.call, dtype = call, getattr(torch, call.dtype)
        generator = torch.Generator("cuda").manual_seed(0)

        def random_of(heads: int, length: int) -> torch.Tensor:
            return torch.randn(
                call.batch, heads, length, call.size, generator=generator, device="cuda", dtype=torch.float32
            ).to(dtype)

        # Attention that picks few of many keys, and a tree that weighs as much as the prefix: else a mean over
        # thousands of keys would hide both a wrong mask and a wrong tile.
        self.query = 3 * random_of(call.heads, call.nodes)
        self.keys, self.values = (random_of(call.kv_heads, call.tree_end) for _ in range(2))
        self.values[:, :, call.prefix :] *= max(1, call.prefix // 32)
        parents = [-1, *(max(0, node // 2 - 1) for node in range(1, call.nodes))]
        words_NW = words_from_parents(parents)
        self.words = words_NW.expand(call.batch, -1, -1).contiguous().cuda()
        self.lengths = torch.full((call.batch,), call.prefix, device="cuda")
        self.mask = tree_mask(self.lengths, self.words)
        self.seen_NN = mask_from_words(words_NW).cuda()
        self.scale = call.size**-0.5

    def ours(self) -> Run:
        return lambda: attend_under(self.query, self.keys, self.values, self.mask, self.scale)

    def _dense_mask(self) -> torch.Tensor:
        seen = torch.ones(self.call.nodes, self.call.tree_end, dtype=torch.bool, device="cuda")
        seen[:, self.call.prefix :] = self.seen_NN
        dense = torch.zeros(seen.shape, dtype=self.query.dtype, device="cuda").masked_fill(~seen, float("-inf"))
        return dense.expand(self.call.batch, 1, -1, -1)

    def folded(self) -> Run:
        """The engine's own way without the kernel: query heads folded into the node axis, nothing repeated. Also
        transformers' way for a single node."""
        call = self.call
        group = call.heads // call.kv_heads
        mask = self._dense_mask().repeat(1, 1, group, 1)

        def run() -> torch.Tensor:
            query = self.query.reshape(call.batch, call.kv_heads, group * call.nodes, call.size)
            return F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, scale=self.scale)

        return run

    def sdpa(self) -> Run:
        """As transformers' sdpa_attention_forward does with a mask: keys and values repeated, then SDPA."""
        if self.call.nodes == 1:
            return self.folded()
        group = self.call.heads // self.call.kv_heads
        dense = self._dense_mask()

        def run() -> torch.Tensor:
            keys, values = (
                each[:, :, None]
                .expand(-1, -1, group, -1, -1)
                .reshape(self.call.batch, self.call.heads, -1, self.call.size)
                for each in (self.keys, self.values)
            )
            return F.scaled_dot_product_attention(self.query, keys, values, attn_mask=dense, scale=self.scale)

        return run

    def flex(self) -> Run:
        """FlexAttention, compiled, the tree looked up in a table."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # One code object for all calls: dynamo would stop compiling it at the ninth shape.
        torch._dynamo.reset()
        prefix, seen_NN = self.call.prefix, self.seen_NN

        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (k < prefix) | seen_NN[q, (k - prefix).clamp(min=0)]

        block = create_block_mask(visible, None, None, self.call.nodes, self.call.tree_end, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(self.query, self.keys, self.values, block_mask=block, scale=self.scale, enable_gqa=True)

    def flashinfer(self) -> Run:
        """FlashInfer's prefill with a custom mask, one row."""
        import flashinfer

        if self.call.batch > 1:
            raise ValueError("one row only")
        query = self.query[0].transpose(0, 1).contiguous()
        keys, values = (each[0].transpose(0, 1).contiguous() for each in (self.keys, self.values))
        seen = torch.ones(self.call.nodes, self.call.tree_end, dtype=torch.bool, device="cuda")
        seen[:, self.call.prefix :] = self.seen_NN
        packed = flashinfer.packbits(seen.flatten(), bitorder="little")
        run = flashinfer.single_prefill_with_kv_cache
        return lambda: run(query, keys, values, packed_custom_mask=packed, sm_scale=self.scale)

    def error(self) -> float:
        """Largest difference from the definition, of its largest value; and the check that such a check can fail."""
        inputs = (self.query.float(), self.keys.float(), self.values.float(), self.lengths)
        exact = reference.tree_attention(*inputs, self.words, self.scale)
        largest = float(exact.abs().max())
        if self.call.nodes > 2:
            everything = torch.full_like(self.words, -1)
            blind = reference.tree_attention(*inputs, everything, self.scale)
            if float((blind - exact).abs().max()) < 4 * _TOLERANCE[self.query.dtype] * largest:
                sys.exit(f"{self.call}: an ignored mask would not show; this call checks nothing")
        return float((self.ours()().float() - exact).abs().max()) / largest


def time_ms(run: Run) -> float:
    """Median milliseconds of a call as a CUDA graph, the L2 cache cold."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(_REPLAYS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def copy_bandwidth() -> float:
    """Bytes per second that a copy of a gigabyte reads and writes."""
    source = torch.empty(1 << 29, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_ms(lambda: target.copy_(source)) / 1e3)


def product_rate() -> float:
    """FLOP per second of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (time_ms(lambda: a @ b) / 1e3)


def time_compaction() -> dict[str, float]:
    """Milliseconds to compact a 7B model's cache, by the kernel and by torch."""
    keys, values = (torch.randn(32, 1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start, path = torch.tensor([8000], device="cuda"), torch.tensor([[0, 3, 9, 20]], device="cuda")
    right_keys, right_values = keys.clone(), values.clone()
    reference.compact_cache(right_keys, right_values, start, path)
    compact_cache(keys, values, start, path)
    if not (torch.equal(keys, right_keys) and torch.equal(values, right_values)):
        sys.exit("compaction differs from its definition")
    ways: dict[str, Callable[..., None]] = {"ours": compact_cache, "torch": reference.compact_cache}
    return {name: time_ms(functools.partial(way, keys, values, start, path)) for name, way in ways.items()}


def measure(call: Call, *, bandwidth: float, rate: float) -> dict[str, Any]:
    """One row: the error, milliseconds of each way, and what they amount to."""
    setting = Setting(call)
    error = setting.error()
    if not error <= _TOLERANCE[getattr(torch, call.dtype)]:
        sys.exit(f"{call}: differs from the definition by {error}")
    floor = max(call.cache_bytes / bandwidth, call.flops / rate) * 1e3
    row: dict[str, Any] = asdict(call) | {"error": error, "floor_ms": floor, "left_out": {}}
    ways = {"ours": setting.ours, "sdpa": setting.sdpa, "folded": setting.folded, "flex": setting.flex}
    if importlib.util.find_spec("flashinfer"):
        ways["flashinfer"] = setting.flashinfer
    for name, prepare in ways.items():
        try:
            row[f"{name}_ms"] = time_ms(prepare())
        except Exception as error_of_another:
            if name == "ours":
                raise
            row["left_out"][name] = f"{type(error_of_another).__name__}: {error_of_another}".splitlines()[0][:160]
    row["share_of_bandwidth"] = call.cache_bytes / bandwidth * 1e3 / row["ours_ms"]
    row["share_of_floor"] = floor / row["ours_ms"]
    return row


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a call, in microseconds."""
    others = [name for name in ("sdpa", "folded", "flex", "flashinfer") if any(f"{name}_ms" in row for row in rows)]
    lines = [f"| B Hq/Hkv N D prefix | ours, us | of floor | of bandwidth | {' | '.join(others)} |"]
    lines.append("|---" * (4 + len(others)) + "|")
    for row in rows:
        cells = [f"{row['batch']} {row['heads']}/{row['kv_heads']} {row['nodes']} {row['size']} {row['prefix']}"]
        cells += [f"{1e3 * row['ours_ms']:.1f}", f"{row['share_of_floor']:.0%}", f"{row['share_of_bandwidth']:.0%}"]
        for name in others:
            ms = row.get(f"{name}_ms")
            cells.append("" if ms is None else f"{1e3 * ms:.1f} ({ms / row['ours_ms']:.1f}x)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--json", help="also write everything to this file")
    parser.add_argument("--minutes", type=float, default=4, help="start no further call after this long")
    parser.add_argument("--plan", action="store_true", help="only how an H200 would be used, in bytes; needs no GPU")
    flags = parser.parse_args()
    if flags.plan:
        print_plan(Device.of("sm90", processors=132))
        return
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a GPU; without one see `python -m kernels.aot` and the tests")
    start, rows, skipped = time.monotonic(), [], []
    bandwidth, rate = copy_bandwidth(), product_rate()
    for call in CALLS:
        if time.monotonic() - start > 60 * flags.minutes:
            skipped.append(asdict(call))
            continue
        rows.append(measure(call, bandwidth=bandwidth, rate=rate))
        print(as_table(rows[-1:]).splitlines()[-1], flush=True)
    compaction = time_compaction()
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": bandwidth,
        "product_flops": rate, "calls": rows, "compaction_ms": compaction, "skipped": skipped,
    }  # fmt: skip
    print(f"\n{result['device']}: copies at {bandwidth / 1e9:.0f} GB/s, products at {rate / 1e12:.0f} TFLOP/s")
    print(as_table(rows))
    print(f"compaction: {1e3 * compaction['ours']:.1f} us, torch {1e3 * compaction['torch']:.1f} us")
    if skipped:
        print(f"no time was left for {len(skipped)} calls")
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
