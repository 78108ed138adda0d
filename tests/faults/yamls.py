"""Config files: whole ones, and ones damaged in all the ways in which YAML can be."""

import random
from collections.abc import Mapping
from typing import Any

import yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

TO_REFUSE: Mapping[str, str] = {
    "brackets": "\nseed: " + "[" * 3000,
    "closed brackets": "\nseed: " + "[" * 3000 + "]" * 3000,
    "braces": "\nclient: " + "{lr: " * 3000,
    "python tag": "\nseed: !!python/object/apply:os.system ['touch pwned']\n",
    "unknown tag": "\nseed: !mine 1\n",
    "binary tag": "\nalgorithm: !!binary ZmVkYXZn\n",
    "set tag": "\nseed: !!set {1}\n",
    "doubled key": "\nseed: 1\nseed: 2\n",
    "doubled section": "\nstraggler: {q: 0.1}\nstraggler: {q: 0.2}\n",
    "key and section": "\nstraggler.q: 0.1\nstraggler: {q: 0.2}\n",
    "section is a number": "\nstraggler: 3\n",
    "section is a list": "\nstraggler: [q]\n",
    "section is a text": "\nstraggler: much\n",
    "section is true": "\nstraggler: true\n",
    "mapping as value": "\nstraggler: {q: {a: 1}}\n",
    "list as value": "\nstraggler: {q: [0.1]}\n",
    "list as seed": "\nseed: [1]\n",
    "date as seed": "\nseed: 2020-01-01\n",
    "fraction as seed": "\nseed: 1.5\n",
    "true as seed": "\nseed: true\n",
    "true as number": "\nstraggler: {q: true}\n",
    "number as flag": "\ndp: {local: 2}\n",
    "number as list": "\nmodel: {channels: 8}\n",
    "mapping as list": "\nmodel: {channels: {a: 1}}\n",
    "text as list": "\nmodel: {channels: [a, b]}\n",
    "null as number": "\nclient: {lr: null}\n",
    "null as name": "\nalgorithm: null\n",
    "number as name": "\nalgorithm: 3\n",
    "sexagesimal": "\nseed: 1:30:00x\n",
    "NUL": "\nseed: 1\0\n",
    "bell": "\nseed: 1\x07\n",
    "5,000 digits": "\nseed: " + "9" * 5000 + "\n",
    "5,000 digits as float": "\nclient: {lr: " + "9" * 5000 + "}\n",
    "long text": "\nalgorithm: " + "x" * 5000 + "\n",
    "long key": "\n" + "x" * 5000 + ": 1\n",
    "nan": "\nclient: {lr: .nan}\n",
    "infinity": "\nclient: {lr: .inf}\n",
    "minus infinity": "\ntarget: -.inf\n",
    "nan target": "\ntarget: .nan\n",
    "tab": "\nstraggler:\n\tq: 0.1\n",
    "anchors": "\n" + BOMB,
    "own anchor": "\nstraggler: &a {q: *a}\n",
    "number as key": "\n1: 2\n",
    "null as key": "\nnull: 1\n",
    "true as key": "\ntrue: 1\n",
    "list as key": "\n? [1, 2]\n: 3\n",
    "number as field": "\nstraggler: {1: 2}\n",
    "list as field": "\nstraggler: {? [1] : 2}\n",
    "empty key": '\n"": 1\n',
    "dots": "\nstraggler.q.r: 1\n",
    "dot": "\n.: 1\n",
    "unknown key": "\nseeed: 1\n",
    "unknown section": "\nstragler: {q: 0.1}\n",
    "unknown field": "\nstraggler: {Q: 0.1}\n",
    "empty field": '\nstraggler: {"": 0.1}\n',
    "nonsense preset": "\npreset: smokey\n",
    "number as preset": "\npreset: 3\n",
    "list as preset": "\npreset: [smoke]\n",
    "null preset": "\npreset: null\n",
    "resume maybe": "\nresume: maybe\n",
    "resume list": "\nresume: [true]\n",
    "resume null": "\nresume: null\n",
    "list as out": "\nout: [a]\n",
    "null as out": "\nout: null\n",
    "mapping as out": "\nout: {a: 1}\n",
    "long out": "\nout: " + "n" * 5000 + "\n",
    "NUL in out": '\nout: "a\\0b"\n',
    "NUL in data.dir": '\ndata: {name: mnist, dir: "a\\0b"}\n',
    "NUL in artifacts": '\nartifacts: "a\\0b"\nsharing: {setting: shuffled_synthetic}\n',
    "NUL in algorithm": '\nalgorithm: "a\\0b"\n',
    "line break in algorithm": '\nalgorithm: "a\\nb"\n',
    "escape in algorithm": '\nalgorithm: "\\x1b[31m"\n',
    "surrogate": '\nalgorithm: "\\ud800"\n',
    "two documents": "\nseed: 2\n---\nseed: 1\n",
    "not closed": '\nalgorithm: "fedavg\n',
    "only a list": "\r- 1\n",
    "only a text": "\rabc\n",
    "only a number": "\r3\n",
    "only a tag": "\r!!python/name:os.system\n",
}
"""What is added to a file of keys and values, or with a carriage return in front stands in its place."""

TO_HOLD: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "exponent": ("\nfedprox: {mu: 1e-3}\n", {"fedprox.mu": 1e-3}),
    "merged": ("\n<<: {seed: 3}\n", {"seed": 3}),
    "merged section": ("\nstraggler: {<<: {q: 0.25}}\n", {"straggler.q": 0.25}),
    "quoted number": ('\nseed: "3"\n', {"seed": 3}),
    "quoted flag": ('\ndp: {local: "true"}\n', {"dp.local": True}),
    "whole float": ("\nseed: 3.0\n", {"seed": 3}),
    "hexadecimal": ("\nseed: 0x10\n", {"seed": 16}),
    "octal": ("\nseed: 010\n", {"seed": 8}),
    "underscores": ("\nseed: 1_000\n", {"seed": 1000}),
    "yes": ("\nmeasure: {smoothness: no}\n", {"measure.smoothness": False}),
    "one for a float": ("\nmoon: {mu: 2}\n", {"moon.mu": 2.0}),
    "null where it may": ("\nfeddyn: {clip: null}\n", {"feddyn.clip": None}),
    "dotted": ("\nstraggler.q: 0.25\n", {"straggler.q": 0.25}),
    "dashes": ("\ndata: {validation-from: last}\n", {"data.validation_from": "last"}),
    "other config": ("\nconfig: other.yaml\n", {"seed": 7}),
    "itself": ("\nconfig: c.yaml\n", {}),
    "preset": ("\npreset: smoke\n", {}),
    "preset paper": ("\npreset: paper\n", {}),
    "resume": ("\nresume: true\n", {}),
    "resume yes": ("\nresume: yes\n", {}),
    "empty section": ("\nstraggler: {}\n", {}),
    "null section": ("\nstraggler: null\n", {}),
    "comments": ("\n# mine\n", {}),
    "document": ("\n...\n", {}),
    "nothing": ("\r", {}),
    "null": ("\rnull\n", {}),
}
"""Likewise, and what is asked for so: it holds, or is refused."""


def nested(fields: Mapping[str, Any], rng: random.Random) -> str:
    """The fields as a config file, in sections or with dots."""
    if rng.random() < 0.3:
        return yaml.safe_dump(dict(fields))
    content: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, leaf = name.rpartition(".")
        (content.setdefault(section, {}) if section else content)[leaf] = value
    return yaml.safe_dump(content)


def damaged(fields: Mapping[str, Any], rng: random.Random) -> tuple[bytes, Mapping[str, Any], str]:
    """A file; what is asked for by it; why it must be refused, or nothing."""
    text = nested(fields, rng) if fields else ""
    which = rng.random()
    if which < 0.6:
        name, more = rng.choice(list(TO_REFUSE.items()))
        replaced = more.startswith("\r")
        return (
            (more[1:] if replaced else text + more).encode("utf-8", "surrogatepass"),
            {} if replaced else fields,
            name,
        )
    if which < 0.85:
        name, (more, asked) = rng.choice(list(TO_HOLD.items()))
        return (text + more).encode(), {**fields, **asked}, ""
    way = rng.choice(("bom", "utf-16", "latin-1", "crlf", "cut", "spaces"))
    if way == "latin-1":
        return (text + "\nalgorithm: é\n").encode("latin-1"), fields, way
    if way == "cut":
        text = text[: rng.randrange(1 + len(text))]
        return text.encode(), {}, ""
    if way == "bom":
        return b"\xef\xbb\xbf" + text.encode(), fields, ""
    if way == "utf-16":
        return text.encode("utf-16"), fields, ""
    return (text.replace("\n", "\r\n") if way == "crlf" else "  \n" + text + "\n  \n").encode(), fields, ""
