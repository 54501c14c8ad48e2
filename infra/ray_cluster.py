"""Ray: one cluster per run, and a map of shards over actors that survives their deaths.

Knows nothing of what a shard is.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infra.environment import quiet
from infra.errors import UserError

log = logging.getLogger(__name__)

_MAX_DEATHS = 3
_PROBE_SECONDS = 60.0
# Ray Train on one machine: no node is taken away from under it, nobody reads its metrics, and short runs end at once.
_LOCAL_TRAIN = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}


class Cluster:
    """A Ray cluster that starts when first needed and is gone after `stop` (timed stages want nothing else alive)."""

    def __init__(self, address: str | None = None, *, cpus: int | None = None) -> None:
        """`address` joins an existing cluster; otherwise a local one with `cpus` cores is started."""
        self.address, self.cpus = address, cpus or os.cpu_count() or 1
        self._started = False
        self._scratch: Path | None = None
        self._pool: _Pool | None = None

    def start(self) -> None:
        """Starts or joins; UserError if nothing answers at the address."""
        quiet()
        if not self.address:
            # Whoever reaches Ray's ports runs code here, and on Linux they listen to the whole network. Named after the
            # systems where this is the default, and read when Ray is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        if ray.is_initialized():
            return
        self._started = True
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "ignore_reinit_error": True}
        if self.address:
            try:
                ray.init(address=self.address, **common)
            except ConnectionError as error:
                raise UserError(
                    f"no Ray cluster answers at {self.address!r} ({error}): start it, or leave the address out. One "
                    "that asks for a token, as `ray start` makes them, wants RAY_AUTH_MODE=token here too"
                ) from None
            return
        # Workers inherit these. A runtime environment would say it too, but the workers that Ray starts ahead of need
        # fit only actors without one.
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        for name, value in _LOCAL_TRAIN.items():
            os.environ.setdefault(name, value)
        # A short path: the sockets below it have a length limit. An own folder: several runs may share a machine.
        self._scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp" if Path("/tmp").is_dir() else None))
        ray.init(
            num_cpus=self.cpus,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            _temp_dir=str(self._scratch),
            **common,
        )

    def probe(self, root: Path) -> None:
        """UserError that names the nodes of a cluster joined by address which don't see the files under `root`: workers
        there would fail in the middle of a run, or worse, write to a folder of their own."""
        if not self.address:
            return
        self.start()
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder = root / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix="probe-", suffix=".txt") as file:
            file.write(file.name)
            file.flush()
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            look = ray.remote(num_cpus=0, max_retries=0)(_sees)
            there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
            asked = {look.options(scheduling_strategy=at).remote(file.name): node for node, at in there.items()}
            answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE_SECONDS)
            blind = [asked[each] for each in answered if not _got(each)]
            if blind or silent:
                named = ", ".join(
                    [f"{nodes[node]} (doesn't see it)" for node in blind]
                    + [f"{nodes[asked[each]]} (no answer in {_PROBE_SECONDS:.0f} s)" for each in silent]
                )
                raise UserError(
                    f"not every node of the Ray cluster at {self.address} sees the files under {root}: {named}. Mount "
                    "the same file system there, at the same path, or give another --root"
                )

    def free(self) -> None:
        """Gives back what idle actors hold, for work that needs the whole cluster."""
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def stop(self) -> None:
        """Ends what `start` began. Does nothing, not even import Ray, if that never happened."""
        if not self._started:
            return
        import ray

        self.free()
        ray.shutdown()
        self._started = False
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def map(
        self,
        make: Callable[..., Any],
        arguments: dict[str, Any],
        shards: Sequence[Any],
        *,
        actors: int,
        threads: int,
        gpus: float = 0.0,
    ) -> Iterator[Any]:
        """Yields `make(**arguments).run(shard)` for every shard, as they finish, over `actors` Ray actors.

        The actors' processes stay for the next call, and so does what they made if `make` and its arguments are the
        same: starting and loading cost more than small shards do. One that dies is replaced and its shard given again,
        up to three deaths; an error that `run` raises ends the map and is raised here, stripped of Ray's wrapping.
        """
        self.start()
        import ray

        pool = self._pool_for(actors=actors, threads=threads, gpus=gpus)
        idle, queue, running, deaths = list(pool.actors), list(shards), {}, 0
        try:
            while queue or running:
                while idle and queue:
                    actor, shard = idle.pop(), queue.pop(0)
                    running[actor.run.remote(make, arguments, shard)] = (actor, shard)
                (finished,), _ = ray.wait(list(running), num_returns=1)
                actor, shard = running.pop(finished)
                try:
                    yield ray.get(finished)
                except ray.exceptions.RayActorError as error:
                    deaths += 1
                    if deaths > _MAX_DEATHS:
                        raise RuntimeError(f"{deaths} workers died, the last on shard {shard!r}: {error}") from None
                    log.warning("a worker died (%d of %d tolerated); its shard is given again", deaths, _MAX_DEATHS)
                    actor = pool.replace(actor)
                    queue.insert(0, shard)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                idle.append(actor)
        finally:
            if running:
                # Left early: what the actors still do is nobody's any more.
                self.free()

    def _pool_for(self, *, actors: int, threads: int, gpus: float) -> _Pool:
        if self._pool is None or self._pool.shape != (actors, threads, gpus):
            self.free()
            self._pool = _Pool(actors, threads, gpus)
        return self._pool


def _sees(name: str) -> bool:
    """Whether this node sees a file with its own name in it."""
    path = Path(name)
    return path.is_file() and path.read_text() == name


def _got(answer: Any) -> bool:
    import ray

    try:
        return bool(ray.get(answer))
    except ray.exceptions.RayError:
        return False


class _Host:
    """One actor's process. It keeps the worker it made last, and its imports for whichever kind of worker is next."""

    def __init__(self, threads: int) -> None:
        quiet()
        import torch

        torch.set_num_threads(threads)
        self._made: tuple[Any, Any] | None = None

    def run(self, make: Callable[..., Any], arguments: dict[str, Any], shard: Any) -> Any:
        signature = (make, repr(sorted(arguments.items())))
        if self._made is None or self._made[0] != signature:
            # The old worker goes before the new one comes: two models may not fit.
            self._made = None
            self._made = (signature, make(**arguments))
        return self._made[1].run(shard)


class _Pool:
    """Hosts, alike and replaceable."""

    def __init__(self, actors: int, threads: int, gpus: float) -> None:
        import ray

        self.shape = (actors, threads, gpus)
        remote = ray.remote(num_cpus=threads, num_gpus=gpus)(_Host)
        self._create = lambda: remote.remote(threads)
        self.actors = [self._create() for _ in range(actors)]

    def replace(self, dead: Any) -> Any:
        self.actors.remove(dead)
        self.actors.append(self._create())
        return self.actors[-1]

    def kill(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
