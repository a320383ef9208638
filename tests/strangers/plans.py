"""The eight plans that every stranger is asked for, on 8 devices: each kind of parallelism, alone and with others."""

NUM_DEVICES = 8
PLANS = (
    "data=8 zero=3",
    "data=2 tensor=4 zero=1",
    "data=2 tensor=2d:4 microbatches=2",
    "tensor=2.5d:8/2 zero=2",
    "tensor=3d:8",
    "data=2 tensor=2 sequence=ring:2",
    "data=2 tensor=2 pipeline=1f1b:2 microbatches=4",
    "tensor=2d:4 pipeline=gpipe:2 microbatches=2",
)
