"""Config files of all kinds: bombs of aliases, deep nesting, odd tags and bytes, files of 100 MB, and no files."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from faults import cases, yamls
from faults.cases import Case
from faults.damage import VALUES, altered
from faults.processes import Ended
from faults.runs import Script
from faults.verdicts import Fault, last, shown

BASE: Mapping[str, Any] = {
    "seed": 1, "algorithm": "fedavg", "preset": "smoke", "client": {"lr": 0.1, "epochs": 1}, "data": {"limit": 40},
    "federation": {"rounds": 1}, "tracking": {"wandb": "off"}, "straggler": {"q": 0.0}, "partition": {"alpha": 0.5},
    "sharing": {"setting": "real"}, "measure": {"every": 0}, "model": {"name": "linear"}, "dp": {"local": False},
}  # fmt: skip
"""A right file."""

TAGS = (
    "!!python/object/apply:os.system ['touch ../pwned']", "!!python/name:os.system", "!!python/module:os",
    "!!python/tuple [1]",
    "!!python/object/new:subprocess.Popen [[touch, ../pwned]]", "!!binary AAAA", "!!binary '***'", "!!set {1, 2}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]", "!!timestamp x", "!!int x", "!!float x", "!!bool x", "!!null x", "!!str 3", "!!int 3",
    "!!float .inf", "!mine 1",
    "!!map [1]", "!!seq {a: 1}", "!<tag:x> 1", "!", "!!", "! 3", "!!int 0x", "!!int '9' ", "!!int 1:61",
    "!!float 1_0.5", "!!merge <<",
    "!!value =", "=", "<<", "2020-13-45", "2020-01-01 25:61:61", "0o7", "0b2", "1_0", "1e3", "+.inf", ".NaN", "'", '"',
    "&a *a", "*nowhere",
    "&", "*", "|", ">", "%", "@x", "`x", "? ", ": ", "- ", "{", "[", "}", "]", ",", "#", "---", "...", "\t", "|9\n x",
    "'a\n\n\nb'", "１", "٣",
    "&a [*a]", "&a {x: *a}", "{<<: {q: 1}}", "{<<: [1]}", "{<<: 3}", "{<<: *x}", "[<<, 1]", "on", "NO", "~", "0777",
    "-0", "0x1G", "1__0",
)  # fmt: skip
"""What may stand as a value."""

SIZES = (2**20, 10 * 2**20, 100 * 2**20)
"""Bytes of a large file."""


def _bomb(rng: random.Random) -> bytes:
    """Aliases of aliases: few bytes, and very many values."""
    width, depth = rng.choice(((2, 30), (9, 9), (9, 5), (100, 3), (3, 60), (1000, 2), (2, 5000)))
    kind = rng.choice(("list", "map", "merge"))
    first = {"list": "a0: &a0 [x]\n", "map": "a0: &a0 {x: 1}\n", "merge": "a0: &a0 {x: 1}\n"}[kind]
    parts = [first]
    for i in range(1, depth):
        many = ", ".join([f"*a{i - 1}"] * width)
        pairs = ", ".join(f"k{j}: *a{i - 1}" for j in range(width))
        parts.append(
            {
                "list": f"a{i}: &a{i} [{many}]\n",
                "map": f"a{i}: &a{i} {{{pairs}}}\n",
                "merge": f"a{i}: &a{i} {{<<: [{many}]}}\n",
            }[kind]
        )
    end = rng.choice(
        (
            f"seed: *a{depth - 1}\n",
            f"client: *a{depth - 1}\n",
            f"<<: *a{depth - 1}\n",
            f"client: {{<<: *a{depth - 1}}}\n",
            "",
        )
    )
    return ("".join(parts) + end).encode()


def _deep(rng: random.Random) -> bytes:
    n = rng.choice((50, 500, 5_000, 100_000))
    text = rng.choice(("[" * n, "[" * n + "]" * n, "{a: " * n, "- " * n, "? " * n,
    "a:\n" + "".join(" " * i + "a:\n" for i in range(min(n, 2000))),
                       "!!seq [" * n, "&a [" * n, "'" * n, "{" * n + "}" * n, "-\n" * n, "? - " * n))  # fmt: skip
    return (rng.choice(("seed: ", "x: ", "", "client: {lr: ")) + text + "\n").encode()


def _tagged(rng: random.Random) -> bytes:
    lines = yaml.safe_dump(dict(BASE)).splitlines()
    i = rng.randrange(len(lines))
    key = lines[i].partition(":")[0]
    lines[i] = f"{key}: {rng.choice(TAGS)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def _bytes(rng: random.Random) -> bytes:
    content = yamls.nested(dict(BASE), random.Random(0)).encode()
    i, j = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    odd = rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"\x1b[31m", b"\x85", "\u2028".encode(), b"\r", b"\x7f",
    b"\xed\xa0\x80", b"\xc2\x9f", "\ufeff".encode(),
                      "\U0001f600".encode(), b"\t", b"\\", b"%", b"\xe2\x80\xae"))  # fmt: skip
    return rng.choice((
        content[:i] + odd + content[i:], content[:i] + content[j:], content[:i] + content[j:] + content[i:j],
        odd + content,
        content[:j] + content[i:], content.decode().encode("utf-16"), content.decode().encode("utf-32"),
        content[:i] + odd * 1000,
        bytes(rng.randrange(256) for _ in range(200)), content.replace(b"\n", b"\r\n"), content.replace(b": ", b":"),
        content.upper(),
        content.replace(b" ", b"\t"), b"---\n" + content + b"---\n" + content, b"%YAML 3.0\n---\n" + content,
        b"%TAG ! x\n---\n" + content,
    ))  # fmt: skip


def _large(rng: random.Random) -> bytes:
    size = rng.choice(SIZES)
    base = yaml.safe_dump(dict(BASE)).encode()
    part = rng.choice((b"# comment\n", b"\n", b" ", b"x", b"- 1\n", b"a: 1\n", b"seed: 1\n", b"[", b"\0"))
    return rng.choice(
        (base + part * (size // len(part)), part * (size // len(part)), base + b"x: '" + b"y" * size + b"'\n")
    )


def _changed(rng: random.Random) -> bytes:
    """A value of another type, anywhere."""
    return yaml.safe_dump(altered(dict(BASE), rng), allow_unicode=True).encode("utf-8", "surrogatepass")


def _key(rng: random.Random) -> bytes:
    """A key of any type, doubled, or in another spelling."""
    key = rng.choice([*BASE, *VALUES])
    text = (
        key
        if isinstance(key, str) and key.isidentifier()
        else yaml.safe_dump(key, default_flow_style=True).replace("\n...\n", "").strip()
    )
    more = rng.choice((f"{text}: 1\n", f"? {text}\n: 1\n", f"client: {{{text}: 1}}\n", f"{text}: {text}\n",
    f"{text}.{text}: 1\n",
                       f"{text}:\n", f"'{text}': 1\n", f"{text}+: 1\n", f"--{text}: 1\n"))  # fmt: skip
    return (yaml.safe_dump(dict(BASE)) + more).encode("utf-8", "surrogatepass")


CONTENTS = (_bomb, _deep, _tagged, _tagged, _bytes, _bytes, _large, _changed, _changed, _changed, _key, _key)

PLACES = ("fifo", "/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "loop", "dangling", "sparse", ".", "c.yaml/x",
"socket", "zero",
          "/proc/self/mem", "/proc/self/environ", "", "itself", "ring", "missing", "~nosuchuser/c",
          "x" * 5000)  # fmt: skip
"""What may stand in a file's place."""


def _place(here: Path, place: str) -> None:
    if place == "fifo":
        os.mkfifo(here / "fifo")
    elif place == "loop":
        (here / "loop").symlink_to("loop")
    elif place == "dangling":
        (here / "dangling").symlink_to("nowhere")
    elif place == "zero":
        (here / "zero").symlink_to("/dev/zero")
    elif place == "sparse":
        with open(here / "sparse", "wb") as file:
            file.truncate(20 * 2**30)
    elif place in ("itself", "ring"):
        (here / "itself").write_text("config: itself\n")
        (here / "ring").write_text("config: ring2\n")
        (here / "ring2").write_text("config: ring\n")
    elif place == "socket":
        os.mknod(here / "socket", 0o140666)


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number."""
    rng = random.Random(f"yaml {seed} {number}")
    script, again = rng.choice(("run", "run", "run", "table1", "tune")), rng.randrange(10**9)
    way = rng.random()
    place = rng.choice(PLACES) if way < 0.08 else ""
    wrong = rng.choice([*yamls.TO_REFUSE]) if 0.08 <= way < 0.25 else ""
    path = place if way < 0.08 else "c.yaml"
    prints = rng.random() < 0.5 or script != "run"
    options = ["--out", "out", *(["--print_config"] if prints else [])]
    options += ["--space", "alpha=0.1,1"] if script == "tune" else []

    def furnish(here: Path) -> str:
        draw = random.Random(again)
        if way < 0.08:
            _place(here, place)
            return f"--config {shown(place)}"
        if wrong:
            more = yamls.TO_REFUSE[wrong]
            content = (more[1:] if more.startswith("\r") else yaml.safe_dump(dict(BASE)) + more).encode(
                "utf-8", "surrogatepass"
            )
        else:
            content = draw.choice(CONTENTS)(draw)
        (here / "c.yaml").write_bytes(content)
        return f"{len(content)} bytes: {wrong} {shown(ascii(content[:60] if wrong else content[-120:]), 150)}"

    def judge(here: Path, ended: Ended) -> list[Fault]:
        if wrong and not (prints and wrong in OF_A_RUN):
            return [Fault("silent", f"taken: {wrong}", last(ended.out))]
        if prints:
            return [] if len(ended.out) > 300 else [Fault("silent", "no config printed", last(ended.out))]
        return cases.whole(here, ended)

    argv = ["--config", path, *options]
    return Case(
        f"{script} {'--print_config ' * prints}",
        cases.line(scripts[script], *argv),
        furnish,
        judge,
        seconds=15,
        gigabytes=1.5,
    )


OF_A_RUN = ("unknown tag",)
"""What is not looked at where the config is only printed."""
