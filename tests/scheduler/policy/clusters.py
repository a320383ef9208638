"""Random jobs and nodes for the laws of policies."""

from hypothesis import strategies as st

from cjax.scheduler.policy.job import Job, Nodes, Placement, Speed, SpeedTable
from cjax.scheduler.policy.packing import counted, fits, place, rooms

amounts = st.sampled_from([0.01, 0.3, 1.0, 2.0, 3.0, 7.0, 100.0, 1e4])


@st.composite
def speed_tables(draw: st.DrawFn) -> SpeedTable:
    """Of sizes that start anywhere, and speeds that need not grow."""
    sizes = draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), min_size=1))
    return SpeedTable([Speed(size, draw(amounts), draw(st.sampled_from([8.0, 64.0]))) for size in sizes])


@st.composite
def jobs_of(draw: st.DrawFn, name: str) -> Job:
    least = draw(st.sampled_from([1, 1, 1, 2, 4]))
    return Job(
        name,
        draw(speed_tables()),
        batch=8.0,
        noise=draw(st.sampled_from([0.0, 30.0, 1e4])),
        work_left=draw(st.none() | amounts),
        work_done=draw(amounts),
        waited=draw(st.sampled_from([0.0, 60.0, 1e4, 1e6])),
        least=least,
        most=draw(st.none() | st.integers(least, 16)),
        restart=draw(st.sampled_from([0.0, 5.0, 30.0, 1e3])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Job], Nodes, dict[str, Placement]]:
    """Jobs, nodes, and an allocation of any sizes for which there is room."""
    nodes = {
        f"node{n}": size
        for n, size in enumerate(draw(st.lists(st.sampled_from([4, 4, 4, 2, 8]), min_size=1, max_size=4)))
    }
    jobs = [draw(jobs_of(f"job{n}")) for n in range(draw(st.integers(0, 6)))]
    sizes: dict[str, int] = {}
    per_node = max(nodes.values())
    for job in jobs:
        size = draw(st.sampled_from([0, *(s for s in job.speeds.sizes if s <= per_node or s % per_node == 0)]))
        if fits(counted([*sizes.values(), size]), rooms(nodes)):
            sizes[job.name] = size
    return jobs, nodes, place(sizes, nodes, {})
