"""What a sweep hands its trials by the names of their cells, in Ray's key-value store: what Tune gets it writes down.

Tune's own way to hand values over (``tune.with_parameters``) keeps them in the object store until its driver ends.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NAMESPACE = "fedcommons"

DRIVER = ""
"""The name under which trials find the driver's ``hosts.facts``; no cell has it."""


@contextmanager
def by_name(values: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile trials of this driver can ask for these plain values; afterwards they are gone."""
    from ray.experimental import internal_kv

    keys = {_key(name): json.dumps(value) for name, value in values.items()}
    try:
        for key, value in keys.items():
            internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)
        yield
    finally:
        for key in keys:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def value(name: str) -> Any:
    """What is handed over under this name."""
    from ray.experimental import internal_kv

    return json.loads(internal_kv._internal_kv_get(_key(name), namespace=NAMESPACE))


def _key(name: str) -> str:
    import ray

    return f"{ray.get_runtime_context().get_job_id()}/{name}"
