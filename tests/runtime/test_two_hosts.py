"""The page "Several machines": a head and a worker, each a host of its own, an operator who starts them, a stranger."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hosts
import pytest
from hosts import ASK, Host

from fedcommons.runs.experiment import run
from fedcommons.runtime import cpu_kind

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TABLE1 = "sweeps/table1.py --preset smoke --wandb off --algorithms fedavg --settings real"
BOTH = f"{TABLE1},shuffled_synthetic --without-references"


ENVIRONMENT = ". ~/fedcommons/cluster/environment.sh && export RAY_ADDRESS=auto"


@dataclass(frozen=True)
class Lab:
    """The hosts, and the folder that all of them have as /mnt. other: has the secrets, and is not in the file."""

    head: Host
    worker: Host
    operator: Host
    stranger: Host
    other: Host
    shared: Path

    def type(self, line: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command of the operator in the folder of the code."""
        return self.operator.run("sh", "-c", f"cd /mnt/code && {line}", timeout=timeout)

    def page(self, beginning: str) -> str:
        """Return the command of the page that begins so, with the addresses, user, key and folder of these hosts."""
        blocks = re.findall(r"^```bash\n(.*)\n```", (ROOT / "docs/howto/machines.md").read_text(), re.MULTILINE)
        (line,) = (block for block in blocks if block.startswith(beginning))
        for old, new in (("10.0.0.1", self.head.ip), ("10.0.0.2", self.worker.ip), ("USER=me", "USER=root"),
                         ("~/.ssh/id_ed25519", "/mnt/keys/operator"), ("/shared", "/mnt")):  # fmt: skip
            line = line.replace(old, new)
        return line

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start a command in the code's folder on the head, by ``ray exec``."""
        remote = f"{ENVIRONMENT} && cd ~/fedcommons && {line}"
        command = self.operator.command("sh", "-c", f"cd /mnt/code && ray exec my_cluster.yaml '{remote}'")
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a command, which is a good one, and return what it printed."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


SOON = (
    "RAY_health_check_period_ms=500 AUTOSCALER_UPDATE_INTERVAL_S=1 AUTOSCALER_HEARTBEAT_TIMEOUT_S=10 "
    "RAY_gcs_rpc_server_reconnect_timeout_s=10 RAY_gcs_server_request_timeout_seconds=20"
)
"""Ray finds after seconds, not minutes, that a worker or the head has ended."""

NODES = """
import ray
ray.init(log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()), "nodes")
"""


WORK = """
import time, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0)
def work():
    time.sleep(600)
sleeping = work.remote()
time.sleep(5)
print("works", flush=True)
ray.get(sleeping)
"""


RESERVE = """
import pathlib, time, ray
ray.init(log_to_driver=False)
head = "node:__internal_head__"
(cores,) = [node["Resources"]["CPU"] for node in ray.nodes() if head in node["Resources"]]
assert ray.util.placement_group([{"CPU": cores, head: 0.001}]).wait(300)
print("reserved", flush=True)
while pathlib.Path("/mnt/reserve").exists():
    time.sleep(0.1)
"""
"""Takes the head's cores, so that trials run on the worker, while a file lies there."""


def processes(host: Host) -> list[str]:
    """What runs on a host, without its first process and its SSH server."""
    lines = host.run("ps", "ax", "-o", "args=").stdout.splitlines()
    return [line for line in lines if not line.startswith(("sh -c", "sleep", "sshd", "ps ax"))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The cluster that `make cluster` starts."""
    if why := hosts.missing():
        pytest.skip(why)
    shared = tmp_path_factory.mktemp("shared")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if not name.startswith("docs/results") and (ROOT / name).is_file():
            (shared / "code" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, shared / "code" / name)
    (shared / "code" / ".venv").symlink_to(sys.prefix)
    (shared / "code" / ".venv" / ".installed").touch()  # the Makefile's mark
    (shared / "nodes.py").write_text(NODES)
    (shared / "reserve.py").write_text(RESERVE)
    with hosts.network(shared, ["head", "worker", "operator", "stranger", "other"]) as (head, worker, *rest):
        operator, stranger, other = rest
        nodes = Lab(head, worker, operator, stranger, other, shared)
        file = shared / "code" / "ray_cluster.yaml"
        file.write_text(file.read_text().replace("ray start --", f"{SOON} ray start --num-cpus=1 --"))
        # They hold for a third host, too, which joins later, so `make cluster` keeps them.
        done = nodes.type(f"sh cluster/secrets.sh {head.ip} {worker.ip} {other.ip} && cp -r ~/.fedcommons /mnt/secrets")
        assert done.returncode == 0, done.stderr
        other.run("sh", "-c", "mv /mnt/secrets ~/.fedcommons && cp -r /mnt/code ~/fedcommons")
        done = nodes.type(nodes.page("make cluster "))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Ray runs on {head.ip}, {worker.ip}" in done.stdout
        wait_for_nodes(nodes, 2)
        yield nodes


def wait_for_nodes(lab: Lab, n: int) -> None:
    deadline = time.monotonic() + 180
    while not re.search(rf"^{n} nodes", output := ends(lab.start("python /mnt/nodes.py")), re.MULTILINE):
        assert time.monotonic() < deadline, output
        time.sleep(2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, sweeps: Callable[[str], ModuleType]) -> Path:
    """The runs of the table in this process."""
    out, script = tmp_path_factory.mktemp("reference"), sweeps("table1")
    words = [*BOTH.split()[1:], "--artifacts", str(out / "artifacts"), "--out", str(out / "table1")]
    for cell in script.grid(script.arguments(words)):
        run(cell.config, out / "table1" / cell.name, say=lambda _: None)
    return out / "table1"


def results(out: Path) -> dict[str, tuple[bytes, bytes]]:
    """What a run's folder says of its course and its end, by the run."""
    return {
        path.parent.name: (path.read_bytes(), (path.parent / "summary.json").read_bytes())
        for path in sorted(out.rglob("rounds.jsonl"))
    }


@contextmanager
def reserved(lab: Lab) -> Iterator[None]:
    """Leave trials no core of the head."""
    (lab.shared / "reserve").touch()
    process = lab.start("python /mnt/reserve.py")
    assert process.stdout is not None
    try:
        assert any("reserved" in text for text in process.stdout)
        yield
    finally:
        (lab.shared / "reserve").unlink()
        process.communicate(timeout=300)


def trial_starts(process: subprocess.Popen[str] | None, host: Host) -> None:
    """Wait until a trial of a command runs on a host. What the command prints until then fits into the pipe."""
    deadline = time.monotonic() + 300
    while not any(line.startswith("ray::ImplicitFunc.train") for line in processes(host)):
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


JOIN = (
    ". ~/fedcommons/cluster/environment.sh && ray start --address={head}:6379 --node-ip-address={ip} --num-cpus=1 "
    '--labels="$(python -m fedcommons.runtime.cpu_kind)"'
)


def test_a_sweep_runs_on_both_hosts_of_one_kind_and_ends_at_the_bits_of_one_process(lab: Lab, reference: Path) -> None:
    """A third host has another kind of CPU, by its /proc/cpuinfo, and gets no work."""
    (lab.shared / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\ncpu family\t: 23\nmodel\t\t: 49\nflags\t\t: avx2\n")
    lab.other.run("mount", "--bind", "/mnt/cpuinfo", "/proc/cpuinfo")
    done = lab.other.run("bash", "-lc", JOIN.format(head=lab.head.ip, ip=lab.other.ip))
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for_nodes(lab, 3)
    with reserved(lab):
        process = lab.start(f"python {BOTH} --artifacts /mnt/artifacts --out /mnt/table1")
        trial_starts(process, lab.worker)
        assert lab.worker.run("pkill", "-STOP", "-f", "^ray::ImplicitFunc").returncode == 0  # so that the head gets one
    trial_starts(process, lab.head)
    again = lab.type(lab.page("make cluster "))  # would restart Ray
    assert again.returncode == 2
    assert again.stderr.count("the start would end the sweep") == 2
    assert not any(line.startswith("ray::ImplicitFunc") for line in processes(lab.other))
    assert lab.worker.run("pkill", "-CONT", "-f", "^ray::ImplicitFunc").returncode == 0
    assert f"2 node(s) {cpu_kind.cpu()}; not used: host other (amd-23-49-avx2 with torch" in ends(process)
    assert results(lab.shared / "table1") == results(reference)
    for path in (lab.shared / "table1").rglob("environment.json"):
        assert json.loads(path.read_text())["cpu_kinds"] == [cpu_kind.cpu()]
    lab.other.run("bash", "-lc", "ray stop")
    wait_for_nodes(lab, 2)


def test_hosts_with_other_code_or_no_common_folder_are_refused_before_any_run(lab: Lab) -> None:
    """Code differs after a `ray rsync-up` without -A; without a common folder runs would be missing in the table."""
    output = ends(lab.start(f"python {TABLE1} --artifacts /mnt/artifacts --out ~/alone; echo ended with $?"))
    assert all(words in output for words in ("ended with 2", "error: --out", "host worker", "--storage")), output
    changed = "lightning_modules/classifier.py"
    lab.worker.run("sh", "-c", f"echo >> ~/fedcommons/{changed}")
    output = ends(lab.start(f"python {TABLE1} --artifacts /mnt/artifacts --out /mnt/mixed; echo ended with $?"))
    assert all(words in output for words in ("ended with 2", "error: ", "host worker has other code", changed)), output
    assert lab.type(lab.page("make cluster-sync")).returncode == 0
    hashed = [host.run("md5sum", f"fedcommons/{changed}").stdout for host in (lab.head, lab.worker)]
    assert hashed[0] == hashed[1]
    for folder in ("/root/alone", "/mnt/mixed"):
        assert lab.head.run("ls", "-A", folder).stdout.split() == [".lock", "messages.log"]


def test_hosts_that_lack_something_are_named_and_nothing_is_started(lab: Lab) -> None:
    """A host that does not answer, a key that is not registered, no common folder, a port that another program uses."""
    listen = "import socket, time; server = socket.create_server(('', 6380)); time.sleep(600)"
    process = subprocess.Popen(lab.head.command("python", "-c", listen, "--gcs-address=127.0.0.1:6390"))  # as of a Ray
    other = subprocess.Popen(lab.operator.command("python", "-c", listen.replace("6380", "6379")))
    before, line = lab.type("cat my_cluster.yaml").stdout, lab.page("make cluster ")
    key, head, worker = "/mnt/keys/operator", f"host {lab.head.ip}", f"host {lab.worker.ip}"
    lab.operator.run("cp", key, "/root/.ssh/id_ed25519")  # used without KEY; the head has no key of its own
    for change, what, word in (
        ((lab.worker.ip, f"{lab.worker.ip} 198.18.7.99"), "host 198.18.7.99", "does not answer"),
        ((key, "/mnt/keys/host"), head, "refuses user root"),
        ((key, f"{key}.pub"), "KEY", "private SSH key"),
        ((f"KEY={key}", ""), worker, "with its own keys"),
        (("OUT=/mnt", "OUT=/root"), worker, "OUT=/root is not the same folder"),
        (("OUT=/mnt", "OUT=/mnt PORT=6380"), head, "another program uses port 6380"),
        (("", ""), head, "at port 6390"),
        ((f" {lab.worker.ip}", ""), worker, "make cluster-stop"),  # whose Ray runs
    ):
        done = lab.type(line.replace(*change))
        assert done.returncode == 2
        assert f"error: {what}" in done.stderr
        assert word in done.stderr, done.stderr
    assert lab.type("cat my_cluster.yaml").stdout == before
    done = lab.type('make cluster HOSTS=""')
    assert (done.returncode, "host operator: another program uses port 6379" in done.stderr) == (2, True), done.stderr
    for host, program in ((lab.head, process), (lab.operator, other)):
        host.run("pkill", "-f", "create_server")
        program.wait()


def test_ray_up_as_cloned_starts_ray_on_this_machine_alone_and_no_other_ray_is_ended(lab: Lab) -> None:
    """Both ways, without SSH. A Ray of the same user at another port stays."""
    options = "--head --port=6390 --ray-client-server-port=23456"
    # on the loopback interface, as the certificate holds for the lab's hosts only
    done = lab.type(f". cluster/environment.sh && RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 ray start {options}")
    assert done.returncode == 0, done.stderr
    for line in (lab.page("ray up "), 'make cluster HOSTS=""'):
        done = lab.type(line)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "make cluster HOSTS=" in done.stdout
        done = lab.type(f"ray exec ray_cluster.yaml '{ENVIRONMENT} && python /mnt/nodes.py'")
        assert "1 nodes" in done.stdout, done.stdout + done.stderr
    (lab.shared / "work.py").write_text(WORK)
    done = lab.type(
        f"ray exec ray_cluster.yaml '{ENVIRONMENT} && nohup setsid --fork python /mnt/work.py > /mnt/work.log 2>&1'"
    )
    assert done.returncode == 0, done.stderr
    lab.operator.run("sh", "-c", "until grep -q works /mnt/work.log; do sleep 0.2; done")
    done = lab.type('make cluster HOSTS=""')
    assert (done.returncode, "would end the sweep" in done.stdout + done.stderr) == (2, True), done.stdout
    ports = [each.split()[3] for each in lab.operator.run("ss", "-ltnH").stdout.splitlines()]
    assert any(port.endswith("127.0.0.1]:6379") for port in ports), ports
    done = lab.type("ray down -y ray_cluster.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    running = " ".join(processes(lab.operator))
    assert "6390" in running
    assert "6379" not in running
    lab.type("ray stop --force")


def test_a_stranger_gets_nothing_from_any_port(lab: Lab) -> None:
    for host in (lab.head, lab.worker):
        listening = host.run("ss", "-ltnH").stdout.splitlines()
        ports = {int(line.split()[3].rpartition(":")[2]) for line in listening} - {22}
        assert len(ports) >= 3
        result = lab.stranger.run("python", "-c", ASK, host.ip, *map(str, sorted(ports)))
        assert result.returncode == 0, result.stderr
        answers = json.loads(result.stdout)
        assert len(answers) == 4 * len(ports)
        for (port, kind), answer in ((name.split(), answer) for name, answer in answers.items()):
            refused = answer == "" or re.match(r"HTTP/1\.[01] (401|400) ", answer)
            assert refused, (host.name, port, kind, answer)
    line = f". /mnt/code/cluster/environment.sh && ray start --address={lab.head.ip}:6379"
    done = lab.stranger.run("sh", "-c", line)  # Ray itself would try for minutes, and say nothing
    assert done.returncode == 2
    assert re.fullmatch(r"error: host stranger: /root/.fedcommons/auth_token is missing: .*\n", done.stderr)


def test_a_killed_worker_costs_time_only_and_stop_leaves_nothing(lab: Lab, reference: Path) -> None:
    """Ray starts the worker again, as the file says. The last test of the lab, as nothing is left after it."""
    line = lab.page("ray exec ").replace("/mnt/table1", "/mnt/worker")
    assert TABLE1 in line
    line = line.replace(" python ", " nohup setsid --fork python ")[:-1] + " > /mnt/worker.log 2>&1'"
    with reserved(lab):
        done = lab.type(line)  # its SSH session ends, and the sweep continues
        assert done.returncode == 0, done.stderr
        trial_starts(None, lab.worker)
        lab.worker.run("pkill", "-9", "-f", "ray")
    deadline = time.monotonic() + 400
    while "All in " not in (printed := (lab.shared / "worker.log").read_text()):
        assert time.monotonic() < deadline, printed
        time.sleep(1)
    played = results(lab.shared / "worker")
    assert len(played) == 2  # of two alphas
    assert played.items() < results(reference).items()
    deadline = time.monotonic() + 180
    while "raylet" not in (running := " ".join(processes(lab.worker))) or "ray start" in running:
        assert time.monotonic() < deadline, running
        time.sleep(1)
    done = lab.type(lab.page("make cluster-stop"))
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 120
    while remaining := [line for host in (lab.head, lab.worker) for line in processes(host)]:
        assert time.monotonic() < deadline, remaining
        time.sleep(1)
