"""A thousand command lines, each in a fork, in a folder of its own."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from faults import options, places, processes, verdicts
from faults.grammar import Knows, Line
from faults.processes import Begun, Ended
from faults.runs import Found
from faults.verdicts import CELLS, STOPPED

from fedcommons.config import cli
from fedcommons.config.flat import to_dict
from fedcommons.sweeping import sweep as tuning

Scripts = dict[str, Callable[[Sequence[str]], int]]


Before = tuple[places.Content, str]
"""The user's files in a line's folder, and what was made there for the line."""


class Lines:
    """Runs lines in folders below ``root``; scripts: what ``options.scripts`` found; make: the line of a number."""

    def __init__(self, root: Path, seed: int, scripts: Scripts, make: Callable[[int, int, Knows], Line]) -> None:
        self.root, self.seed, self.scripts, self.make = root, seed, scripts, make
        generates = ("--sharing.setting", "shuffled_synthetic")  # so that generators' options are among them
        self.knows = {n: options.of(s, generates if n in ("run", "tune") else ()) for n, s in scripts.items()}
        self.templates = root / "templates"
        self.templates.mkdir(parents=True)
        for name, fields in places.RUNS.items():
            base = {**places.TINY, **fields, "out": name}
            ended = processes.end(self._start(Line(name, "run", base, []), self.templates))
            if ended.code:
                raise RuntimeError(f"the run that the others are compared with failed:\n{ended.err}")

    def run(self, numbers: Sequence[int], at_once: int = 2) -> Iterator[tuple[int, list[Found]]]:
        """How each line ended, and what went wrong, in the order in which they end."""
        counts: dict[str, int] = dict.fromkeys(
            ("refused", "stopped", "finished", "reached Ray", "printed", "endless"), 0
        )
        befores: dict[int, Before] = {}

        def begin(number: int) -> Begun:
            line = self.make(self.seed, number, self.knows)
            befores[number] = self._furnish(line, self._folder(number))
            return self._start(line, self._folder(number))

        for number, ended in processes.side_by_side(begin, numbers, at_once):
            line, folder = self.make(self.seed, number, self.knows), self._folder(number)
            before, made = befores.pop(number)
            faults = verdicts.of(line, folder, self.templates, ended, places.lost(before))
            counts[_outcome(line, ended)] += 1
            shutil.rmtree(folder)
            if (n := sum(counts.values())) % 100 == 0:
                print(f"{n} lines: {', '.join(f'{name} {count}' for name, count in counts.items())}", flush=True)
            yield ended.code, [Found(number, fault, f"{line}{made}") for fault in faults]

    def shortest(self, found: Found) -> str:
        """The line without the pieces that the fault does not need."""
        line, text, folder = self.make(self.seed, found.number, self.knows), found.line, self._folder(found.number)
        for i in reversed(range(len(line.pieces))):
            if line.pieces[i].make is not None:  # others may build on it
                continue
            shorter = replace(line, pieces=[*line.pieces[:i], *line.pieces[i + 1 :]])
            before, made = self._furnish(shorter, folder)
            ended = processes.end(self._start(shorter, folder))
            again = verdicts.of(shorter, folder, self.templates, ended, places.lost(before))
            if (found.fault.kind, found.fault.what) in {(f.kind, f.what) for f in again}:
                line, text = shorter, f"{shorter}{made}"
            shutil.rmtree(folder)
        return text

    def show(self, number: int) -> list[Found]:
        """Run one line, and leave its folder; what went wrong."""
        line, folder = self.make(self.seed, number, self.knows), self._folder(number)
        before, made = self._furnish(line, folder)
        ended = processes.end(self._start(line, folder))
        print(
            f"{line}{made}\nasked: {line.asked}\nwrong: {line.wrong}\n"
            f"in {folder}: exit {ended.code}{', late' * ended.late}"
        )
        print(ended.out[-3000:], ended.err[-6000:], sep="\n--- stderr\n")
        faults = verdicts.of(line, folder, self.templates, ended, places.lost(before))
        for fault in faults:
            print(fault)
        return [Found(number, fault, f"{line}{made}") for fault in faults]

    def _folder(self, number: int) -> Path:
        return self.root / f"line-{number:05d}"

    def _furnish(self, line: Line, folder: Path) -> Before:
        """Make the folder of a line."""
        folder.mkdir()
        places.furnish(folder, self.templates)
        made = [piece.make(folder, self.templates) for piece in line.pieces if piece.make is not None]
        ours = () if line.reads else ("whole", "store", "run")
        users = {
            p: content
            for p, content in places.contents(folder).items()
            if p.relative_to(folder).parts[0] not in ours or b'{"mine"' in content
        }
        return users, "".join(f"   [{text}]" for text in made if text)

    def _start(self, line: Line, folder: Path) -> Begun:
        environment = {"HOME": str(folder / "home"), "FEDCOMMONS_DATA": None, "RAY_ADDRESS": None, **line.environment}
        action = partial(_call, self.scripts[line.script], line.argv, folder / CELLS)
        seconds = 15 if verdicts.endless(line) else 60
        return processes.begin(action, folder, environment, seconds=seconds, limits=processes.memory())


def _call(script: Callable[[Sequence[str]], int], argv: Sequence[str], cells: Path) -> None:
    """The script's process; where it would start Ray it ends, and the cells of a sweep are noted."""
    make_cell = tuning.cell

    def note(*given: Any) -> tuning.Trial:
        cell = make_cell(*given)
        with open(cells, "a", encoding="utf-8") as file:
            file.write(json.dumps(to_dict(cell.config)) + "\n")
        return cell

    def stop(*_: object, **__: object) -> None:
        print(f"\n{STOPPED}", flush=True)
        os._exit(0)

    with (
        mock.patch.object(tuning, "cell", note),
        mock.patch.object(ray, "init", stop),
        mock.patch.object(sys, "argv", ["script", *argv]),
    ):
        cli.main(script)


def _outcome(line: Line, ended: Ended) -> str:
    if ended.late:
        return "endless"
    if ended.code == 0 and verdicts.prints(line):
        return "printed"
    if ended.code == 0:
        return "reached Ray" if ended.out.rstrip().endswith(STOPPED) else "finished"
    return "refused" if ended.code == 2 else "stopped"
