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
                    f"no Ray cluster answers at {self.address!r} ({error}): start it, or leave the address out"
                ) from None
            return
        # A short path: the sockets below it have a length limit. An own folder: several runs may share a machine.
        self._scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp" if Path("/tmp").is_dir() else None))
        ray.init(
            num_cpus=self.cpus,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            _temp_dir=str(self._scratch),
            runtime_env={"env_vars": {"PYTHONWARNINGS": "ignore"}},
            **common,
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

        The actors stay for the next call with the same arguments, since loading them costs more than small shards do.
        One that dies is replaced and its shard given again, up to three deaths; an error that `run` raises ends the
        map and is raised here, stripped of Ray's wrapping.
        """
        self.start()
        import ray

        pool = self._pool_for(make, arguments, actors=actors, threads=threads, gpus=gpus)
        idle, queue, running, deaths = list(pool.actors), list(shards), {}, 0
        try:
            while queue or running:
                while idle and queue:
                    actor, shard = idle.pop(), queue.pop(0)
                    running[actor.run.remote(shard)] = (actor, shard)
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

    def _pool_for(
        self, make: Callable[..., Any], arguments: dict[str, Any], *, actors: int, threads: int, gpus: float
    ) -> _Pool:
        signature = (make, repr(sorted(arguments.items())), actors, threads, gpus)
        if self._pool is None or self._pool.signature != signature:
            self.free()
            import ray

            environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            remote = ray.remote(num_cpus=threads, num_gpus=gpus, runtime_env={"env_vars": environment})(make)
            self._pool = _Pool(signature, lambda: remote.remote(**arguments), actors)
        return self._pool


class _Pool:
    """Actors of one kind, alike and replaceable."""

    def __init__(self, signature: tuple[Any, ...], create: Callable[[], Any], count: int) -> None:
        self.signature, self.create = signature, create
        self.actors = [create() for _ in range(count)]

    def replace(self, dead: Any) -> Any:
        self.actors.remove(dead)
        self.actors.append(self.create())
        return self.actors[-1]

    def kill(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
