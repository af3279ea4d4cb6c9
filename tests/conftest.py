"""One hypothesis profile for all: the same examples every time, and no deadline on slow disks."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shardc",
    derandomize=True,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("shardc")
