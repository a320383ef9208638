"""Ray as a cluster's executor: a placement group for each job, an agent on each of its bundles, and plain processes.

Ray is imported where it is used: it is an extra.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cjax.cluster import agent as agent_module
from cjax.cluster.agent import Agent
from cjax.cluster.executor import NodeGone
from cjax.job import processes as processes_module
from cjax.job.member import SUPERVISOR
from cjax.scheduler.policy.job import Placement

# Ray takes 127.0.0.1 for a name of this machine, and goes to its other address; this one is of the loopback alone too.
LOOPBACK = "127.0.0.2"
SLOT = "cjax"  # the resource that virtual devices are
_MEMORY = 80 * 2**20  # bytes of Ray's own store on each node, in which nothing of ours is
_ANSWERED = 60.0  # seconds in which a placement group is there, or an agent answers
_LOOK = 1.0  # between two looks at whether nodes are there
# Ray asks each node so often whether it is there, and so often in vain: otherwise it takes ten seconds and more.
_HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
_MISTRUSTED = 60.0  # for which a node gets nothing whose agent has died: Ray needs some to say that it is gone
_CALLS = 32  # that an agent has at once: each process that it has started waits in one


class RayExecutor:
    """Starts Ray on this machine, or joins one.

    Args:
        nodes: devices of each, where it is started here: a raylet each.
        address: of one that runs, whose nodes are taken.
        has_cards: whether devices are the GPUs that Ray knows; else they are virtual.

    Raises:
        ImportError: Ray is not installed.
        ValueError: one at that address listens without a token.
    """

    def __init__(self, nodes: Mapping[str, int], address: str, has_cards: bool) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._resource = "GPU" if has_cards else "CPU" if address else SLOT
        if address:
            check_address(address, os.environ)
        else:
            # Its processes listen on all networks of the machine, whatever address they are given.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        try:
            import ray  # pyright: ignore[reportMissingImports]
            from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError('--executor ray needs Ray: pip install "cjax[ray]"') from None
        self._ray, self._own = ray, None
        self._mistrusted: dict[str, float] = {}  # nodes by number, and until when
        ray.cloudpickle.register_pickle_by_value(agent_module)
        ray.cloudpickle.register_pickle_by_value(processes_module)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address:
            ray.init(address=address, **quiet)
            return
        # A head without devices: its end is that of all, and no node's.
        self._own = Cluster(initialize_head=False, shutdown_at_exit=True)
        every = {"node_ip_address": LOOPBACK, "object_store_memory": _MEMORY, "num_cpus": 0}
        every |= {"include_dashboard": False, "include_log_monitor": False}
        self._own.add_node(node_name="head", no_monitor=True, _system_config=_HEALTH, **every)
        for name, devices in nodes.items():
            own = {"num_gpus": devices} if has_cards else {"resources": {SLOT: devices}}
            self._own.add_node(node_name=name, **every, **own)
        ray.init(address=self._own.address, _node_ip_address=LOOPBACK, **quiet)

    def _alive(self) -> dict[str, dict[str, Any]]:
        """Nodes that are there and have devices, by name; several of one name, by that and their number."""
        found: dict[str, dict[str, Any]] = {}
        for node in self._ray.nodes():
            is_trusted = time.monotonic() > self._mistrusted.get(node["NodeID"], 0.0)
            if is_trusted and node["Alive"] and node["Resources"].get(self._resource, 0) >= 1:
                name = node["NodeName"]
                found[f"{name}-{node['NodeID'][:6]}" if name in found else name] = node
        return found

    def nodes(self) -> dict[str, int]:
        return {name: int(node["Resources"][self._resource]) for name, node in sorted(self._alive().items())}

    def hold(self, name: str, placement: Placement) -> "RayHeld":
        alive = self._alive()
        if gone := [node for node in placement if node not in alive]:
            raise NodeGone(f"node {gone[0]} is gone")
        chosen = [(alive[node], len(devices)) for node, devices in placement.items()]
        return RayHeld(self._ray, name, self._resource, chosen, self._mistrust)

    def _mistrust(self, node: str) -> None:
        self._mistrusted[node] = time.monotonic() + _MISTRUSTED

    def close(self) -> None:
        self._ray.shutdown()
        if self._own is not None:
            logs = self._own.head_node.get_session_dir_path()
            self._own.shutdown()
            shutil.rmtree(logs, ignore_errors=True)


class RayHeld:
    """A placement group, and an agent on each of its bundles."""

    def __init__(
        self,
        ray: Any,
        name: str,
        resource: str,
        nodes: Sequence[tuple[dict[str, Any], int]],
        mistrust: Callable[[str], None],
    ) -> None:
        from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        self._ray, self._address, self._mistrust = ray, nodes[0][0]["NodeManagerAddress"], mistrust
        self._nodes = [node["NodeID"] for node, _ in nodes]
        bundles = [{resource: count} for _, count in nodes]
        places = [{"ray.io/node-id": node["NodeID"]} for node, _ in nodes]
        self._group = placement_group(bundles, name=f"cjax {name}", bundle_label_selector=places)
        try:
            self._answer(self._group.ready())
        except NodeGone:
            self.release()
            raise
        kind = {"num_gpus": nodes[0][1]} if resource == "GPU" else {"resources": {resource: nodes[0][1]}}
        kind = {"num_cpus": nodes[0][1]} if resource == "CPU" else {"num_cpus": 0, **kind}
        remote = ray.remote(Agent)
        self._agents = [
            remote.options(
                **kind, max_restarts=0, max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(len(nodes))
        ]  # fmt: skip

    def start(
        self, rank: int, line: Sequence[str], environment: Mapping[str, str], log: Path, folder: str
    ) -> "RayProcess":
        agent = self._agents[rank]
        pid = self._asked(rank, agent.start.remote(list(line), dict(environment), SUPERVISOR, str(log), folder))
        return RayProcess(self._ray, agent, pid)

    def meeting(self) -> tuple[str, int]:
        return self._asked(0, self._agents[0].meeting.remote(self._address))

    def _asked(self, rank: int, answer: Any) -> Any:
        """What an agent answers."""
        try:
            return self._answer(answer)
        except self._ray.exceptions.RayActorError as error:
            self._mistrust(self._nodes[rank])
            raise NodeGone(f"the node of worker {rank} is gone, and its agent with it") from error

    def _answer(self, answer: Any) -> Any:
        """What Ray answers, as long as the nodes are there: for what is placed on a dead one it would wait."""
        until = time.monotonic() + _ANSWERED
        while True:
            try:
                return self._ray.get(answer, timeout=_LOOK)
            except self._ray.exceptions.GetTimeoutError:
                alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
                if not alive.issuperset(self._nodes) or time.monotonic() > until:
                    raise NodeGone("a node is gone, or does not answer") from None

    def release(self) -> None:
        self._ray.util.remove_placement_group(self._group)  # and its agents with it


class RayProcess:
    """A process that an agent has started."""

    def __init__(self, ray: Any, agent: Any, pid: int) -> None:
        self._ray, self._agent, self._pid = ray, agent, pid
        self._end = agent.wait.remote(pid)
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        if self._code is None and self._ray.wait([self._end], timeout=0)[0]:
            try:
                self._code = self._ray.get(self._end)
            except self._ray.exceptions.RayError:
                self._code = -9  # its node or its agent is gone, and it with them
        return self._code

    def stop(self) -> None:
        if self.poll() is None:
            self._tell(self._agent.stop)

    def show_stacks(self) -> None:
        if self.poll() is None:
            self._tell(self._agent.show_stacks)

    def kill(self) -> None:
        """Where the agent is gone, the process has seen it, and leaves."""
        self._tell(self._agent.kill)

    def _tell(self, what: Any) -> None:
        try:
            self._ray.get(what.remote(self._pid), timeout=_ANSWERED)
        except self._ray.exceptions.RayError:
            self._code = -9 if self._code is None else self._code


def check_address(address: str, environment: Mapping[str, str]) -> None:
    """Raises ValueError for a Ray that anybody who reaches it may use, unless it is on this machine's loopback."""
    host = address.removeprefix("ray://").rpartition(":")[0]
    is_here = host in ("localhost", "::1", "[::1]") or host.startswith("127.")
    if not is_here and environment.get("RAY_AUTH_MODE") != "token":
        raise ValueError(
            f"--address {address}: whoever reaches a Ray without a token runs there what they like. Start it, and type "
            "this, with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) in the environment"
        )
