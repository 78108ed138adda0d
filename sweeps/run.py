"""Run one experiment and print each round's facts.

python sweeps/run.py --preset small --sharing.setting shuffled_synthetic --partition.alpha 0.01
python sweeps/run.py --config FILE.yaml --out runs/mine --resume
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcommons import cli, experiment, presets


def run(argv: Sequence[str]) -> int:
    dataset = cli.early(argv, "data.name", "digits")
    defaults = presets.preset(cli.early(argv, "preset", "small"), dataset)
    parser = cli.parser("Run one federated experiment.", defaults)
    parser.add_argument("--preset", default="small", type=str, help=", ".join(presets.PRESETS))
    parser.add_argument("--out", default="runs/run", type=str, help="run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    options = cli.parse(parser, argv)
    config = presets.settled(options.preset, cli.experiment(options), options.asked)

    def show(number: int, metrics: Mapping[str, float | None]) -> None:
        facts = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items() if value is not None)
        print(f"round {number}  {facts}", flush=True)

    summary = experiment.run(config, Path(options.out), resume=options.resume, on_round=show)
    print(json.dumps({k: v for k, v in summary.items() if not isinstance(v, list)}, indent=1))
    print(f"run folder: {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.main(run)
