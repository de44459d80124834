"""Replicas as Ray actors. Ray is an optional part of the installation, imported only here and only when asked for."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedcli.core.config import RunConfig
from pagedcli.core.errors import CannotRunError
from pagedcli.generate.fleet import ReplicaLost
from pagedcli.generate.replica import Replica, Task

LOCAL = "local"
"""Address that means: start Ray on this machine, for this job only."""

OBJECT_STORE_BYTES = 200 << 20
"""Shared memory for answers on their way, when Ray is started for the job: each is some kilobytes to megabytes."""


class RayCrew:
    """Implements `fleet.Crew`. `replicas` None: as many as the cluster has GPUs for, else one a machine.

    Raises CannotRunError when Ray is missing, the cluster cannot be reached, or it is too small.
    """

    def __init__(self, address: str, replicas: int | None, config: RunConfig, sampling: Mapping[str, Any],
                 shared_prefix: str | None) -> None:
        self._ray: Any = _import_ray()
        self._actors: dict[Hashable, Any] = {}
        self._sampling = dict(sampling)
        self._prefix = shared_prefix
        cores = len(os.sched_getaffinity(0))
        self._connect(address, max(replicas or 1, cores))
        try:
            self._plan(replicas, config)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str, cpus: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address == LOCAL:
            quiet.update(num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
        try:
            self._ray.init(address=address, **quiet)
        except Exception as fault:  # Ray raises what it likes here; to a user each means that there is no cluster
            reason = str(fault).strip().split("\n")[0]
            raise CannotRunError(f"--ray {address}: no Ray cluster can be reached there ({reason}). Give the address "
                                 "that `ray start --head` printed, or --ray alone for one on this machine",
                                 "no_ray_cluster") from fault

    def _plan(self, replicas: int | None, config: RunConfig) -> None:
        """Decide how many replicas there are and what each may use."""
        have = self._ray.cluster_resources()
        machines = sum(1 for node in self._ray.nodes() if node.get("Alive"))
        gpus, cpus = int(have.get("GPU", 0)), have.get("CPU", 0.0)
        each = config.model.tensor_parallel_size
        on_gpu = config.model.device == "cuda" or (config.model.device == "auto" and gpus > 0)
        on_gpu = on_gpu and config.model.model != "null"
        self.replicas = replicas or (max(gpus // each, 1) if on_gpu else machines)
        if on_gpu and gpus < self.replicas * each:
            raise CannotRunError(f"--replicas {self.replicas} of {each} GPUs each need {self.replicas * each} GPUs and "
                                 f"the cluster has {gpus}; lower --replicas", "cluster_too_small")
        if cpus <= 0:
            raise CannotRunError("the Ray cluster has no CPUs to run replicas on", "cluster_too_small")
        self._needs = {"num_gpus": each if on_gpu else 0, "num_cpus": min(1.0, cpus / self.replicas)}
        model = config.model
        if model.threads is None and not on_gpu:
            crowd = -(-self.replicas // max(machines, 1))
            model = replace(model, threads=max(1, int(cpus / max(machines, 1)) // crowd))
        if model.model != "null" and Path(model.model).expanduser().exists():
            model = replace(model, model=str(Path(model.model).expanduser().resolve()))
        self._config = replace(config, model=model)

    def hire(self) -> Hashable:
        remote = self._ray.remote(Replica)
        actor = remote.options(scheduling_strategy="SPREAD", max_restarts=0, **self._needs).remote(
            self._config, self._sampling, self._prefix)
        self._actors[actor._actor_id] = actor
        name: Hashable = actor._actor_id
        return name

    def start(self, worker: Hashable) -> Hashable:
        call: Hashable = self._actors[worker].start.remote()
        return call

    def work(self, worker: Hashable, tasks: Sequence[Task], more: bool) -> Hashable:
        call: Hashable = self._actors[worker].work.remote(tasks, more)
        return call

    def done(self, calls: Sequence[Hashable], seconds: float) -> Sequence[Hashable]:
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        found: Sequence[Hashable] = ready
        return found

    def answer(self, call: Hashable) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError,
                errors.OutOfMemoryError) as fault:
            raise ReplicaLost(_short(fault)) from fault
        except errors.RayTaskError as fault:
            raise CannotRunError(f"a replica failed: {_short(fault.cause)}", "replica_failed") from fault

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # it may be gone already, and so may the cluster
                self._ray.kill(actor)
        self._actors.clear()
        self._ray.shutdown()


def _short(fault: object) -> str:
    lines = [line.strip() for line in str(fault).strip().split("\n") if line.strip()]
    return lines[0][:200] if lines else type(fault).__name__


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as fault:
        raise CannotRunError("--ray needs Ray, which is not installed here: pip install 'pagedcli[ray]'",
                             "no_ray") from fault
    return ray
