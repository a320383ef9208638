"""Operations that XLA's partitioner gets wrong, done on each device's own shards."""
