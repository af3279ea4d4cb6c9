"""The runtime: a rank's shard, straight onto its device."""
