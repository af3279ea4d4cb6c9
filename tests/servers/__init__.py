"""Loopback servers for tests: a Hub and an S3, real to their clients, with faults on order."""
