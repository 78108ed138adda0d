"""Right parts of one's own, one of each kind, and what in them can be done wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEAD = """import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar
import numpy as np
import torch
import fedcommons
from fedcommons import *
from fedcommons import Message, Reply, Release, Examples, Contribution, Contributions, Assigned, TrainedGenerator
from fedcommons import UserError, flat, add, sub, generator

"""


@dataclass(frozen=True)
class Right:
    """A part that keeps all promises.

    option: by which it is named; with_it: options that it needs; used: methods whose result is used, and the words of
    which a sentence about it must have one; deep: of such methods, wrong results made from the right one (``r``).
    """

    option: str
    source: str
    used: Sequence[str]
    with_it: Mapping[str, str]
    deep: Mapping[str, Sequence[str]]
    unused: Sequence[str] = ()


ALGORITHM = '''
@dataclass(frozen=True)
class Mine:
    """FedAvg.

    Args:
        beta: a constant
    """
    beta: Annotated[float, "[0, 1)"] = 0.5
    def check(self, fields): pass
    def start(self, model, facts, seed): return {"model": model}
    def down(self, state, round, client): return Message({"model": state["model"]})
    def client(self, work, message, memory, data, round, seed):
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed)
        return Reply({"delta": sub(y, x)}, metrics=metrics, releases=[spent.of("delta")])
    def merge(self, executor, state, total, replies, round, seed):
        return {"model": add(flat(state, "model"), flat(total, "delta"), 1 / len(replies))}
'''

CHOOSING = (
    ALGORITHM
    + """
    def participants(self, state, round): return [0, 1]
"""
)

SHARING_METHOD = (
    ALGORITHM
    + """
    def share(self, clients, n_classes, seed): return Common(Examples(clients.store.x[:4], clients.store.y[:4]), 64)
"""
)

MODEL = '''
from pytorch_lightning import LightningModule
class Mine(LightningModule):
    """A linear one."""
    head = "last"
    def __init__(self, shape, n_classes, lr, width: int = 4):
        super().__init__()
        self.lr = lr
        self.last = torch.nn.Linear(int(np.prod(shape)), n_classes)
    def forward(self, x): return self.last(x.float().flatten(1) / 255)
    def training_step(self, batch, batch_idx):
        x, y, *weight = batch
        return torch.nn.functional.cross_entropy(self(x), y)
    def validation_step(self, batch, batch_idx):
        return {"accuracy": (self(batch[0]).argmax(1) == batch[1]).float().mean()}
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), self.lr)
'''

NETWORK = '''
class Mine(torch.nn.Module):
    """A linear one."""
    def __init__(self, shape, n_classes):
        super().__init__()
        self.last = torch.nn.Linear(int(np.prod(shape)), n_classes)
    def forward(self, x): return self.last(x.float().flatten(1) / 255)
'''

PARTITION = '''
def Mine(labels, n_clients, n_classes, rng, seed, share: Annotated[float, "(0, 1]"] = 1.0):
    """Rows in turn."""
    return [np.arange(i, len(labels), n_clients) for i in range(n_clients)]
'''

DATA = '''
def Mine(seed, n: int = 60):
    """Noise."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 255, (n, 8, 8), dtype=np.uint8), np.arange(n) % 3
'''

DATASET = '''
class Mine:
    """Noise."""
    n_classes = 3
    def __init__(self, n: int = 60):
        self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i >= self.n: raise IndexError(i)
        return torch.full((3, 8, 8), i, dtype=torch.uint8), i % 3
'''

STAGE = '''
@dataclass(frozen=True)
class Mine:
    """Means of classes."""
    least: Annotated[int, "[1, 1e6]"] = 1
    def check(self, fields): pass
    def check_dealt(self, dealt): pass
    def make(self, dealt, made): return Contributions.of_made(dealt, [self.means(c) for c in dealt.own])
    def means(self, client):
        return Contribution(Examples(client.x[:2] // 2, client.y[:2]), seen=len(client))
    def release(self, dealt, contributed): return contributed, contributed.releases("mean images")
    def assign(self, dealt, released): return Assigned(dealt.own.rows, [released.rows] * len(dealt.own))
'''

GENERATOR = '''
@dataclass(frozen=True)
class Mine:
    """Pixels."""
    epochs: int = 1
    spread: Annotated[float, "[0, inf)"] = 1.0
    sampling: ClassVar[tuple[str, ...]] = ("spread",)
    def check(self, fields): pass
    def check_type(self, dtype, data): pass
    def check_shape(self, shape, data): pass
    def check_sizes(self, sizes): pass
    def fit(self, examples, n_classes, seed, epochs, *, flip=False):
        return {e: TrainedGenerator({"mean": examples.x.float().mean(0)}) for e in epochs}
    def sample(self, weights, shape, n_classes, labels, seed):
        noise = torch.randn(len(labels), *shape, generator=generator(seed, "pixels"))
        return (weights["mean"] + noise).clamp(0, 255).to(torch.uint8)
'''

RULE = '''
@dataclass(frozen=True)
class Mine:
    """The first is late."""
    q: Annotated[float, "[0, 1)"] = 0.5
    def __call__(self, joined, facts, round, seed): return {i: 0.0 for i in joined if i == 0}
'''

TRACKER = '''
class Mine:
    """Nothing."""
    def __init__(self, folder, config, prefix: str = ""): pass
    def log(self, round, metrics): pass
    def finish(self, summary): pass
'''

MEASURE = '''
@dataclass(frozen=True)
class Mine:
    """One."""
    radius: Annotated[float, "(0, inf)"] = 1.0
    def __call__(self, work, data, round, seed): return {"one": 1.0}
'''

FLOATS = ("r.double()", "r.to(torch.int64)", "r[:-1]", "r * float('nan')", "r.unsqueeze(0)", "r.tolist()")

KINDS: Mapping[str, Right] = {
    "algorithm": Right("algorithm", ALGORITHM, ("start", "down", "client", "merge"), {}, {
        "start": ("{}", "{'model': 3}", "{'weights': r['model']}", "{3: r['model']}", "{**r, 'x': 'text'}",
                  "{**r, 'x': object()}", "{**r, 'x': None}", "[r]", "{'model': r['model'].flat[:-1]}",
                  "{**r, 'model/x': 3}", "{'model': torch.zeros(3)}"),
        "down": ("Message({})", "Message(3)", "Message({'model': 3})", "Message({3: 4})", "Message(r.common, 3)",
                 "Message({'model': None})", "r.common", "Message(r.common, {'a': 'b'})", "Reply({})"),
        "client": ("Reply({})", "Reply(3)", "Reply({'delta': 3})", "Reply({'delta': 'x'})", "Reply({3: 4})",
                   "replace(r, weight=float('nan'))", "replace(r, weight=-1.0)", "replace(r, weight='x')",
                   "replace(r, weight=0.0)", "replace(r, memory=3)", "replace(r, memory={'a': 'b'})",
                   "replace(r, memory={3: torch.zeros(2)})", "replace(r, metrics=3)", "replace(r, metrics={'a': 'b'})",
                   "replace(r, metrics={3: 4.0})", "replace(r, metrics={'a': None})", "replace(r, releases=3)",
                   "replace(r, releases=[3])", "replace(r, releases=None)", "replace(r, each={'a': 'b'})",
                   "replace(r, each=3)", "replace(r, sums={'delta': torch.zeros(3)})", "r.sums", "Message({})",
                   "replace(r, sums={'delta': torch.full((3,), float('nan'))})", "replace(r, weight=10**400)",
                   "replace(r, metrics={'a': torch.zeros(3)})", "replace(r, each={'a': [1, 2]})",
                   "replace(r, releases=[Release(0, ('delta',), 'sampled gaussian', 2.0, 1.0, 1.0, -1)])"),
        "merge": ("{}", "{'model': 3}", "{'x': r['model']}", "{3: 4}", "{**r, 'x': 'text'}", "[r]",
                  "{'model': torch.zeros(3)}", "{**r, 'x': object()}",
                  "{'model': add(r['model'], r['model'], float('nan'))}"),
    }, ("check",)),
    "chooses": Right("algorithm", CHOOSING, ("participants",), {}, {
        "participants": ("[0, 0]", "[-1]", "[99]", "['0']", "[0.5]", "{0: 1}", "'01'", "[None]", "[True]", "[[0]]",
                         "np.array([[0]])", "(i for i in [0])", "[10**30]", "range(10**12)"),
    }),
    "shares": Right("algorithm", SHARING_METHOD, ("share",), {}, {
        "share": ("Common(3, 64)", "Common(r.examples, -1)", "Common(r.examples, 'x')", "Common(r.examples, 64, [3])",
                  "Common(Examples(r.examples.x[:0], r.examples.y[:0]), 0)", "r.examples",
                  "Common(r.examples, float('nan'))", "Common(Examples(r.examples.x.float(), r.examples.y), 1)"),
    }),
    "model": Right("model.name", MODEL, ("__init__", "forward", "training_step", "configure_optimizers",
                                         "validation_step"), {}, {
        "forward": ("r[:, :-1]", "r[:1]", "r.double()", "(r, r)", "{'logits': r}", "r.argmax(1)", "r * float('nan')",
                    "r.sum()", "r.detach()", "r.to(torch.complex64)", "r.to_sparse()"),
        "training_step": ("r.detach()", "{'loss': r}", "{'los': r}", "r.item()", "r * torch.ones(3)",
        "r * float('nan')",
                          "(r, r)", "torch.tensor(1)", "r.double()", "{}"),
        "validation_step": ("{'accuracy': 'x'}", "{'accuracy': float('nan')}", "{3: 1.0}", "{'a': torch.zeros(3)}",
                            "{'accuracy': None}", "{'accuracy': 10**400}", "{'round': 1.0}", "{'a\\x1b': 1.0}"),
        "configure_optimizers": ("[r, r]", "([r], [])", "{'optimizer': r}", "{}", "torch.optim.SGD", "[]",
                                 "torch.optim.LBFGS(a[0].parameters())", "{'optimizer': 3}",
                                 "torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)"),
    }),
    "network": Right("model.name", NETWORK, ("__init__", "forward"), {}, {
        "forward": ("r[:, :-1]", "r[:1]", "r.double()", "(r, r)", "r.argmax(1)", "r * float('nan')", "r.sum()"),
    }),
    "partition": Right("partition.name", PARTITION, ("",), {}, {
        "": ("[]", "[[]]", "[[0], [0]]", "[[-1], [1]]", "[[10**9], [1]]", "[['0'], [1]]", "[[0.5], [1]]", "{0: [1]}",
             "[None, None]", "[np.array([[0]]), [1]]", "r[0]", "[torch.arange(3), [3]]", "[np.ones(len(a[0]), bool)]",
             "[[], [1, 2]]", "np.zeros((2, 3))", "(x for x in r)", "[range(10**12)]", "[[0], 'ab']", "[[True], [2]]"),
    }),
    "data": Right("data.name", DATA, ("",), {"partition.n_clients": "2"}, {}),
    "dataset": Right("data.name", DATASET, ("__init__", "__len__", "__getitem__"), {"partition.n_clients": "2"}, {
        "__len__": ("0", "-1", "10**30", "1.5", "1"),
        "__getitem__": ("r[0]", "(r[0],)", "(r[1], r[0])", "(r[0], 'x')", "(r[0], -1)", "(r[0], None)", "(r[0], 0.5)",
                        "(None, r[1])", "{'x': r[0], 'y': r[1]}", "(r[0][: r[1]], r[1])", "(r[0], 10**9)", "('a', 1)",
                        "(r[0], torch.tensor([1, 2]))", "(r[0].float(), r[1])", "(r[0], 10**30)"),
    }),
    "sharing": Right("sharing.setting", STAGE, ("make", "release", "assign"), {}, {
        "make": ("Contributions.none(dealt)", "replace(r, rows=3)", "replace(r, rows=r.rows + 10**6)",
                 "replace(r, owners=r.owners - 9)", "replace(r, owners=r.owners[:-1])", "replace(r, store=3)",
                 "replace(r, rows=r.rows.astype(float))", "replace(r, rows=list(r.rows))", "replace(r, receipts=3)",
                 "replace(r, seen={0: 'x'})", "r.rows", "replace(r, owners=r.owners.astype(str))",
                 "replace(r, store=Examples(r.store.x[:3], r.store.y[:3]))", "replace(r, rows=-r.rows)"),
        "release": ("r[0]", "(r[0], 3)", "(r[0], [3])", "(r[0], [None])", "(3, r[1])", "(r[0], r[1], 3)", "[*r]",
                    "(r[0], [replace(e, client=99) for e in r[1]])", "(r[0], [replace(e, client='x') for e in r[1]])",
                    "(r[0], [replace(e, sigma='x') for e in r[1]])", "(r[0], [replace(e, what=3) for e in r[1]])"),
        "assign": ("Assigned(3)", "Assigned([])", "Assigned([None, None])", "replace(r, received=[3])",
                   "replace(r, weights=[np.array([1.0])])", "replace(r, weights=3)", "replace(r, n_own=[-1])",
                   "replace(r, once=-1)", "replace(r, once='x')", "replace(r, notes=3)", "replace(r, pool=3)",
                   "replace(r, received=[x + 10**6 for x in r.received])", "replace(r, received=r.received[:1])",
                   "replace(r, kept=[x[:0] for x in r.kept], received=[x[:0] for x in r.received])",
                   "replace(r, weights=[np.full(len(k) + len(x), np.nan) for k, x in zip(r.kept, r.received)])",
                   "replace(r, weights=[np.full(len(k) + len(x), -1.0) for k, x in zip(r.kept, r.received)])",
                   "replace(r, kept=[x.astype(str) for x in r.kept])", "replace(r, notes=[3])"),
    }, ("check", "check_dealt")),
    "generator": Right("generator.name", GENERATOR, ("fit", "sample"), {"sharing.setting": "shuffled_synthetic",
                                                                       "sharing.p": "0.5"}, {
        "fit": ("{}", "{e: 3 for e in r}", "{e: TrainedGenerator({}) for e in r}",
        "{e: TrainedGenerator(3) for e in r}",
                "{e + 1: t for e, t in r.items()}", "{str(e): t for e, t in r.items()}", "[*r.values()]",
                "{e: TrainedGenerator({'mean': 'x'}) for e in r}",
                "{e: TrainedGenerator({3: torch.zeros(2)}) for e in r}",
                "{e: TrainedGenerator(t.weights, 3) for e, t in r.items()}", "{e: t.weights for e, t in r.items()}",
                "{e: TrainedGenerator({'mean': None}) for e in r}",
                "{e: TrainedGenerator({'mean': torch.zeros(2)}) for e in r}"),
        "sample": ("r[:-1]", "r.float()", "r[:, :, :-1]", "r.tolist()", "r.numpy()", "r[0]",
        "r.double() * float('nan')",
                   "(r, r)", "r.unsqueeze(0)", "r.to('meta')", "r.to(torch.int64)", "torch.cat([r, r])"),
    }, ("check", "check_type", "check_shape", "check_sizes")),
    "straggler": Right("straggler.rule", RULE, ("__call__",), {}, {
        "__call__": ("{99: 0.0}", "{0: 2.0}", "{0: -1}", "{0: 'x'}", "{'0': 0.0}", "{0: float('nan')}", "{0: None}",
                     "[0]", "{0.5: 0.0}", "{-1: 0.5}", "{i: 0.0 for i in range(99)}", "{0}", "{(0,): 0.0}"),
    }),
    "tracker": Right("tracking.tracker", TRACKER, ("__init__",), {}, {}, ("log", "finish")),
    "measure": Right("measure.measure", MEASURE, ("__call__",), {"measure.every": "1"}, {
        "__call__": ("{'one': 'x'}", "{3: 1.0}", "{'one': None}", "{'one': float('nan')}", "{'one': [1, 2]}",
                     "{'one': torch.zeros(3)}", "{'': 1.0}", "{'a/b': 1.0}", "{'a\\x1bb': 1.0}", "{'one': 10**400}",
                     "{'one': 1j}", "[('one', 1.0)]", "{'one': True}", "{'x' * 5000: 1.0}"),
    }),
}  # fmt: skip
"""By kind."""
