"""What ``--space`` and ``--seeds`` vary, and what they may not."""

from typing import Any

from fedcommons.cli import parse, search_space
from fedcommons.errors import UserError
from fedcommons.reports.cells import ENVIRONMENT


def space(options: parse.Options) -> dict[str, Any]:
    """What is swept, seeds included.

    Raises:
        UserError: a field that cannot be swept.
    """
    found = dict(search_space.read_space(options.space, options.fields, options.chosen))
    parse.refuse_fields(options, dict.fromkeys(found, "space"))
    if options.seeds is not None:
        if "seed" in found:
            raise UserError("--seeds and --space seed both name the seeds; use one of them.")
        parse.refuse_fields(options, {"seed": "seeds"})
        found = {**found, "seed": list(parse.split("--seeds", options.seeds, int))}
    if not options.dp.local and any(name.startswith("dp.") for name in found):
        raise UserError("sigma and the other dp fields change nothing without --dp.local true.")
    drawn = [n for n, values in around(found).items() if not isinstance(values, list)]
    if drawn and (options.search == "optuna" or options.scheduler == "asha"):
        way = "--search optuna" if options.search == "optuna" else "--scheduler asha"
        raise UserError(f"--space {drawn[0]} needs a list of values with {way}, which compares like with like.")
    return found


def around(space: search_space.SearchSpace) -> dict[str, Any]:
    """Those of the space that describe the environment, seeds included: points are not compared across them."""
    return {n: values for n, values in space.items() if n == "seed" or n.startswith(ENVIRONMENT)}
