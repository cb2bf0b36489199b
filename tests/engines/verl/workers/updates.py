"""verl's own manager, actor workers and rollout workers, in ray actors, over an awexd daemon. Writes a JSON report.

``updates.py REPORT SOCKET FOLDER``. Two actor ranks hold one FSDP2 model on gloo, so every tensor that verl's generator
yields is a collective. Two rollout workers, each a replica of its own, hold a plain model each.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import verl
from omegaconf import OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from awexd_client.session import Connection
from tests.engines.verl.workers.actors import Rollout, Trainer

JOB = "verl-job"
ABANDONED_SECONDS = 90.0


class Replica:
    """A replica for verl's manager, which generates nothing: there is nothing to stop or to start again."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def _nothing(self, **_: object) -> None:
        await asyncio.sleep(0)

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def configuration(socket: str) -> CheckpointEngineConfig:
    """verl's own defaults, and the three lines of a user."""
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/rollout/rollout.yaml").checkpoint_engine
    ours = {
        "backend": "awexd",
        "custom_backend_module": "awexd_client.verl",
        "engine_kwargs": {"awexd": {"job": JOB, "socket": socket, "timeout": ABANDONED_SECONDS}},
    }
    config: CheckpointEngineConfig = omega_conf_to_dataclass(OmegaConf.merge(defaults, ours))
    return config


def group(cls: type, size: int, **arguments: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def told(call: Callable[[], object]) -> str:
    """What a call that must fail says."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - ray's wrapper of any kind
        return str(error)[-3000:]
    return ""


class Run:
    """One trainer and two replicas, step by step."""

    def __init__(self, socket: str) -> None:
        self.config = configuration(socket)
        self.rollouts = group(Rollout, 2, config=RolloutConfig(name="vllm", checkpoint_engine=self.config))
        self.replicas = [Replica([worker]) for worker in self.rollouts.workers]
        self.start_trainer(1)

    def start_trainer(self, seed: int) -> None:
        self.trainers = group(Trainer, 2, config=self.config, seed=seed)
        self.manager = CheckpointEngineManager(self.config, self.trainers, list(self.replicas))

    def kill_trainer(self) -> None:
        for worker in self.trainers.workers:
            ray.kill(worker)

    def update(self, step: int | None) -> dict[str, Any]:
        weights, *others = self.trainers.train()
        assert all(other == weights for other in others)
        metrics = self.manager.update_weights(step)
        return {"weights": weights, "metrics": metrics, "rollouts": self.rollouts.holds()}

    def fail(self, step: int, fault: tuple[str, int]) -> dict[str, Any]:
        """An update that fails in the trainer; the rollout workers still wait when they are asked what they hold."""
        self.trainers.train(fault)
        error = told(lambda: self.manager.update_weights(step))
        self.trainers.train()  # both ranks answer: none waits in a collective
        return {"error": error, "rollouts": self.rollouts.holds()}


def main() -> None:
    report, socket, folder = sys.argv[1:]
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _temp_dir=folder,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    try:
        Path(report).write_text(json.dumps(steps(socket)))
    finally:
        ray.shutdown()


def steps(socket: str) -> dict[str, Any]:
    def status() -> Any:
        connection = Connection(socket)
        try:
            return connection.call("status", {}, timeout=10)[0]["jobs"][0]
        finally:
            connection.goodbye()

    run = Run(socket)
    found: dict[str, Any] = {
        "unknown": told(lambda: CheckpointEngineRegistry.new("awexd", bucket_size=1, job="x", jobb="y")),
        "missing": told(lambda: CheckpointEngineRegistry.new("awexd", bucket_size=1, is_master=True)),
        "updates": [run.update(step) for step in (1, 2, 3)],
        "status": status(),
        "raised": run.fail(4, ("raise", 3)),
        "after_raised": run.update(4),
        "refused": run.fail(5, ("twice", 2)),
        "after_refused": run.update(5),
        "same_step": run.update(5),
        "no_step": run.update(None),
    }
    run.kill_trainer()
    run.start_trainer(2)
    found["restarted"] = run.update(7)  # which is held, of the trainer before
    run.manager.remove_replicas([run.replicas[0]])
    found["fewer"] = run.update(8)
    found["status_at_end"] = status()
    return found


if __name__ == "__main__":
    main()
