"""Imports every class of the zoo: ranks are forked from a process that has done so once."""

from __future__ import annotations

import importlib

from tests.zoo import proof as proof
from tests.zoo.case import cases

for _case in cases():
    getattr(importlib.import_module(_case.library), _case.class_name)
