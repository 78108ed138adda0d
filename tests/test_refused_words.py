"""Refused commands, and words that must stand in what each prints: option or field, value, what is allowed or near."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = "command_lines"

REFUSED = r"""
run --Seed 1 -> --Seed '--seed' | run --model my_lab.py:Small --small.widht 3 -> --small.widht '--model.width'
run -- --seed 1 -> '--' | run --dry-run=perhaps -> --dry-run 'perhaps'
run --client.epochs 1:30 -> --client.epochs decimal '1:30' | run --client.lr .inf -> client.lr (0, 1e38] inf
run --target {digits} -> --target large 999... | run --data.augment maybe -> data.augment bool null
run --model.channels '[8, null]' -> model.channels int 'null' | run --model.channels null -> model.channels list
run --model.channels '[[8, 16]]' -> model.channels list [[8
run --measure.every 0 --measure.smoothness true -> measure.every measure.smoothness
run --dataset digit -> data.name 'digits' import path | run --preset authors -> Table 1 digits
run --model no_such_module:Small -> ModuleNotFoundError no_such_module
run --model my_lab.py:Small --cnn.width 3 -> --cnn.width '--model.width'
run --algorithm fedcommons.algorithms.fedavg:FedAvgg -> FedAvgg 'FedAvg'
run --client 5 -> --client section client.accumulate
run --generator.target_epsilon 1 --sharing shuffled_synthetic -> private_ddpm private_gan ddpm
run --model.batch_norm true --model linear -> model.batch_norm cnn linear | run --out '' -> --out file ''
run --out {name300} -> --out long xxx... | run --algorithm fed{escape}avg -> --algorithm control \x1b
run --tracking.group {surrogate} -> --tracking.group control \udc80
run --out word.yaml/x --preset smoke -> word.yaml written | run --out {long} -> --out 4096 5000
run --config {tmp}/folder -> folder no file | run --config loop -> loop symbolic
run --config word.yaml/x -> word.yaml/x directory | run --config replay.yaml -> --replay --round
run --client 3 --round 1 -> --round --replay | run --replay runs/none --round 1 --client 0 -> runs/none config.yaml
run --replay runs/none --rond 1 --client 0 -> --replay --rond
run --replay nowhere --config good.yaml -> --replay --client.lr
run --algorithm fednova --client.optimizer adam -> client.optimizer sgd fednova
run --algorithm gradient_coding --client.optimizer adam -> client.optimizer sgd
run --algorithm feddm --dp.local true -> feddm dp.local noise
run --dp.local true --algorithm scaffold --scaffold.option 1 -> scaffold.option 2 dp.local
run --sharing shuffled_synthetic --generator.schedule cosine -> generator.schedule linear
run --sharing shuffled_synthetic --generator.channels '[8]' -> generator.channels two 8
run --sharing shuffled_synthetic --generator.sampling_steps 2000 -> sampling_steps generator.timesteps 1000
run --config good.yaml --config -> --config needs | run --straggler.deadline 1 -> straggler.deadline independent
run --sharing.c 0.3 -> sharing.c raw_copies real | run --dry-run --replay nowhere -> --replay --dry_run
table1 --preset smoke --storage s3://bucket/../other -> storage s3://BUCKET/PREFIX
table1 --sharing.setting real -> sharing.setting --settings | table1 --settings real,fake -> sharing.setting 'fake'
table1 --federations 10:1,10:1.0 -> --federations different
table1 --federations 10:1 --partition.n_clients 5 -> partition.n_clients --federations
table1 --lrs 0.1,0.2 --data.validation 0 -> --lrs data.validation
table1 --setting shuffled_synthetic --generator= -> generator.name none
tune --space alpha= -> --space NAME=VALUES 'alpha=' | tune --space 'p=uniform(0,1)' -> sharing.p real
tune --sharing shuffled_synthetic --space 'p=normal(0,1)' -> 'normal' 'uniform'
tune --space 'client.batch_size=randint(0.2,0.7)' -> client.batch_size whole
tune --space 'seed=uniform(0,1)' -> seed randint int
tune --sharing shuffled_synthetic --space generator.channels=8 -> generator.channels list
tune --space tracking.wandb=off -> tracking.wandb no result
tune --space lr=0.1 --space client.lr=0.2 -> client.lr twice | tune --space lr=0.1 --seeds 0,0 -> --seeds different
tune --space lr=0.1 --seeds 0 --seed 1 -> seed --seeds | tune --space seed=1,2 --seeds 0 -> --seeds --space
tune --space sigma=1,2 -> sigma --dp.local | tune --space lr=0.1 --metric zeta_ht_sq -> 'zeta_hat_sq'
tune --space lr=0.1 --metric test/top3 -> test/top3 --mode
tune --space lr=0.1 --search optuna --scheduler asha -> optuna fifo
tune --space dp.local=maybe -> dp.local truth 'maybe' | tune --config space.yaml -> client.lr 'fast'
tune --space lr=0.1 --mode maximum -> mode 'max'
figure3 --preset authors -> authors central
feddm --preset authors -> --preset smoke, paper | feddm --algorithms fedavg -> --ipcs feddm
feddm --rates 0.1,0.2 --data.validation 0 -> data.validation | feddm --rates 0.1 --client.lr 0.1 -> client.lr --rates
feddm --study-alpha 0.1,0.2 -> --study-alpha one | feddm --seed 1 -> seed --seeds
feddpms --clients 10:x -> --clients '10:x' | feddpms --lrs 0.1 --lr 0.1 -> client.lr --lrs
private_fedssyn --preset authors -> --preset private
private_fedssyn --generator.target_epsilon 3 -> generator.target_epsilon --epsilons
private_fedssyn --settings real -> --settings generators
private_fedssyn --generator.sigma 3 -> --generator.sigma '--sigmas'
private_fedssyn --generator.target_epochs 3 -> generator.target_epochs --checkpoints
private_sizes --preset authors -> --preset authors | private_sizes --generator ddpm -> generator.name private_ddpm
private_sizes --data.limit 100 -> data.limit --sizes | private_sizes --ways plain,merv -> way 'merf'
private_sizes --preset smoke --partition.n_clients 2 --dry-run -> partition.n_clients 1
private_sizes --preset smoke --p 0 --dry-run -> sharing.p above
private_sizes --sharing real -> sharing.setting shuffled_synthetic | private_sizes --seed 1 -> seed --seeds
replicate --rows R1,R13 -> 'R13' 'R3' | replicate --rows R9 -> R9 docs/results
replicate --on-cores 4 -> --on-cores --dry-run
replicate --data-dir nowhere -> mnist {tmp}/nowhere/MNIST/raw --download
referee -> name a method | referee fedprox --constants mu -> name=value 'mu'
referee fedprox --special-case mu=0 -> --special-case 'mu=0'
referee fedprox --strategy their.py:Server -> --strategy fedprox
audit_pool --sharing real -> sharing.setting real | audit_pool --preset smoke --p 0 --dry-run -> sharing.p
audit_pool --seeds 0,1 --seed 2 -> seed --seeds
advise --settings real -> --settings shuffled_real | advise --algorithms fedprox -> --algorithms fedavg
advise --client.optimizer adam -> client.optimizer sgd | advise --dp.local true -> dp.local False
advise --client.equal_work false -> client.equal_work True | advise --sharing.p 0.1 -> sharing.p --p
advise --partition iid -> iid alpha
compare -> DIR | compare folder --z p -> --z --facet | compare folder --config word.yaml -> client.lr facet
compare nowhere -> nowhere folder
dashboard -> --entity | dashboard folder --project me/mine -> --project 'me/mine'
dashboard folder --name= -> --name 128 | dashboard nowhere -> nowhere folder
report -> RUNS | report folder --out report.pdf -> --out HTML
report folder --out nowhere/report.html -> --out nowhere | report folder -> folder run
watch -> RUNS | watch nowhere -> nowhere folder
storage_gc -> storage | storage_gc nowhere -> nowhere folder | storage_gc http://lab/runs -> 'http:' 's3://'
storage_gc folder --removed -> '--removed' '--remove'
disclosure --round 21 -> --round 20 | disclosure --sharing.c 0.1 -> sharing.c --shares
quadratics --preset small -> preset paper | quadratics --zeta-sq -1 --dry-run -> zeta_sq [0, inf) -1
quadratics --fit none -> fit authors
mnist_softmax --dataset cifar10 -> 'cifar10' digits | mnist_softmax --preset authors -> authors small
gradient_coding --pairs 0.5:3:4 --dry-run -> --pairs '0.5:3:4' | gradient_coding --preset large -> large small
gradient_coding --dataset fmnist -> 'fmnist' digits
communication_saved -> --from | communication_saved --from nowhere.csv -> nowhere.csv
communication_saved --from my_lab.py -> my_lab.py 'dataset' | communication_saved --from folder -> folder run
convergence_parameters --preset authors -> authors | convergence_parameters --measure.every 0 -> measure.every 1
convergence_parameters --generator-p 0 -> --generator-p (0, 1)
convergence_parameters --measure.smoothness true -> measure.smoothness --hessians
convergence_parameters --sharing.setting real -> sharing.setting --p
quality --sharing real -> sharing.setting real
fedcvae --partition iid -> --alphas iid | fedcvae --methods fedcvae -> 'fedcvae-ens' 'fedcvae-kd'
fedcvae --fedcvae.local_epochs 3 -> fedcvae.local_epochs --client.epochs
fedcvae --sharing shuffled_synthetic -> sharing.setting real
fedcvae --preset paper --dataset cifar10 -> paper 'cifar10' | fedcvae --preset authors -> authors small
sensitivity --partition.alpha 1 -> partition.alpha 0.1
sensitivity --generator.name gan -> generator.name --generators | sensitivity --preset authors -> authors small
dsprites --generator.rho 0.5 -> generator.rho --rhos | dsprites --preset authors -> authors small
table1 --config good.yaml -> seed --seeds | table1 --algorithms fedavg --moon.mu 1 -> moon.mu --algorithm moon
table1 --method=fedprox -> --algorithms
table2 --preset authors -> --preset smoke
commons --preset authors -> authors | commons --ways fedsyn -> way 'fedsyn'
commons --algorithms fedprox -> --algorithms --ways | commons --data.validation 0 -> --lrs data.validation
"""
"""Command -> words of its sentence, separated by spaces. Commands of one script may share a line."""
LINES = [row for line in REFUSED.splitlines() for row in line.split(" | ") if row]


@pytest.mark.parametrize("line", LINES)
def test_a_refused_command_names_what_is_wrong(line: str, refusal: Callable[[str], str]) -> None:
    command, _, words = line.partition(" -> ")
    sentence = refusal(command)
    assert [word for word in words.split() if word not in sentence] == [], sentence


def test_every_script_is_in_the_table() -> None:
    scripts = {path.stem for path in (Path(__file__).parent.parent / "sweeps").glob("*.py")}
    assert {line.split()[0] for line in LINES} == scripts
