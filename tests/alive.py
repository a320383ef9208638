"""What is alive in a device's memory, or in the host's behind it."""

import jax


def alive(kind: str = "device", device: jax.Device | None = None) -> int:
    """Bytes of one kind of memory that arrays have on one device, the first if none is given.

    By addresses: an array and its shards are one, and so are two arrays of the same memory. `device_put` of many, in
    another thread, has such a pair for a moment.
    """
    device = device or jax.devices()[0]
    there: dict[int, int] = {}
    for x in jax.live_arrays():
        if x.is_deleted() or x.sharding.memory_kind != kind or device not in x.sharding.device_set:
            continue
        if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            [data] = [shard.data for shard in x.addressable_shards if shard.device == device]
            there[data.unsafe_buffer_pointer()] = data.nbytes
    return sum(there.values())
