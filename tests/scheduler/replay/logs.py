"""A small log with speeds, and a folder of tables as they were published: a model whose times follow a formula."""

from pathlib import Path

SPEEDS = """application,devices,samples_per_second
vision,1,10
vision,2,18
vision,4,30
text,1,5
text,2,10
"""
JOBS = """name,time,application,work,devices
a,0,vision,6000,2
b,30,text,600,1
c,100,vision,1200,4
d,100,text,9000,2
"""


def write_log(folder: Path, jobs: str = JOBS, speeds: str = SPEEDS) -> Path:
    (folder / "speeds.csv").write_text(speeds)
    (folder / "jobs.csv").write_text(jobs)
    return folder / "jobs.csv"


def step_seconds(shape: tuple[int, ...], rows: float) -> tuple[float, float]:
    """Of a step, and of waiting within it: arithmetic is a line, and waiting is longer between nodes."""
    sync = 0.0 if sum(shape) == 1 else 0.05 * len(shape) + 0.01 * sum(shape)
    return 0.1 + 0.01 * rows + sync, sync


def write_tables(folder: Path, name: str = "bert") -> Path:
    """Nodes of 4, up to 4 of them; batches of 8 and 64; 2 epochs."""
    here = folder / "traces" / name
    here.mkdir(parents=True)
    shapes = [(1,), (2,), (3,), (4,), (4, 4), (1, 3)]
    lines = ["placement,local_bsz,step_time,sync_time"]
    for shape in shapes:
        for rows in (2, 4, 8, 16):
            lines.append(f"{''.join(map(str, shape))},{rows},{','.join(map(str, step_seconds(shape, rows)))}")
    (here / "placements.csv").write_text("\n".join([*lines, ""]))
    lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for nodes in (3, 4):
        for rows in (2, 4, 8, 16):
            seconds = ",".join(map(str, step_seconds((4,) * nodes, rows)))
            lines.append(f"{nodes},{4 * nodes},{rows},{seconds}")
    (here / "scalability.csv").write_text("\n".join([*lines, ""]))
    for batch, progress in ((8, (100, 200)), (64, (101, 210))):
        head = "progress,iteration,metric,grad_sqr,grad_var"
        rows = [f"{steps},{steps * 8 / batch},1.0,1.0,{batch / 2}" for steps in progress]
        (here / f"validation-{batch}.csv").write_text("\n".join([head, *rows, ""]))
    return folder / "traces"
