#!/bin/bash
# Runs the experiments of docs/results that take hours, one after another, at low priority, for at most MINUTES.
#
#   sweeps/evidence.sh OUT DATA [MINUTES]        OUT: folder of results   DATA: folder of the data sets   MINUTES: 100
#
# A second call with the same OUT continues where the first stopped: finished runs and generators are not repeated.
# Without --lrs, learning rates are those of docs/results, chosen on seed 0 or 100, which are not reported again. commons.py
# chooses the rates of each row on seed 100.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '4p' "$0" >&2; exit 2; }
out=$(realpath -m "$1") data=$(realpath "$2") end=$((SECONDS + 60 * ${3:-100}))
cd "$(dirname "$0")/.."
export FEDCOMMONS_DATA=$data

experiment() { # NAME SCRIPT OPTIONS: run into OUT/NAME until it is finished or the time is over
    local name=$1 left=$((end - SECONDS)) resume=()
    shift
    [ -e "$out/$name/done" ] && return
    [ "$left" -gt 0 ] || { echo "The time is over before $name; call the script again."; exit 0; }
    [ -e "$out/$name" ] && resume=(--resume)
    echo "$(date '+%F %T') $name: $*"
    timeout --signal=INT --kill-after=120 "$left" nice -n 19 .venv/bin/python "sweeps/$1" "${@:2}" --out "$out/$name" "${resume[@]}" ||
        { [ $((end - SECONDS)) -le 0 ] && { echo "The time is over in $name; call the script again."; exit 0; }
          echo "$name failed, as by a run that diverged; the next call tries it again."; return 0; }
    touch "$out/$name/done"
}

rates="--lrs 0.02,0.04,0.1,0.25 --data.split random --targets 0.8,0.97"
# shellcheck disable=SC2086  # the options are words
experiment "E7-digits-alpha0.01" table1.py $rates --alphas 0.01 --seeds 0,1,2,3,4

generator="--generator.prediction v_prediction --generator.steps 400 --generator.sampling_steps 15"
real="--settings real"
pool="--settings shuffled_synthetic --without-references $generator"
alone="--settings server_synthetic --algorithms one_shot $generator" # the server trains on the pool, in no round
large="--alphas 0.01 --data.limit null --client.epochs 1 --client.batch_size 32 --federation.rounds 10"
# shellcheck disable=SC2086  # the options are words
for data_set in "mnist 0.9 0.03" "fmnist 0.7 0.1"; do # target accuracy; learning rate of the server alone
    set -- $data_set
    one="table1.py --dataset $1 $large --target $2 --algorithms fedavg"
    for seed in 1 2 3; do
        experiment "E1-$1-real-seed$seed" $one $real --client.lr 0.3 --seeds $seed
        experiment "E1-$1-pool-seed$seed" $one $pool --client.lr 0.1 --seeds $seed
        experiment "E2-$1-alone-seed$seed" $one $alone --client.lr $3 --seeds $seed
    done
done

feddpms="feddpms.py --algorithms feddpms --receives= --client.lr 0.01 --seeds 10,11,12,13,14 --data.split random"
# shellcheck disable=SC2086
{
    experiment "E7-digits-alpha0.1" table1.py $rates --alphas 0.1 --seeds 0,1,2,3,4
    experiment "E5-digits-participation" table1.py $rates --alphas 0.01 --seeds 0,1,2 --algorithms fedavg \
        --federations 10:0.4,40:0.2,100:0.1
    experiment "E5-feddpms-preliminary" $feddpms --preliminary 0.3,0.4,0.5 --sigmas= --quotas=
    experiment "E5-feddpms-table5" $feddpms --sigmas 0.5,1,2,4 --quotas 2,5,10,20
}

commons="commons.py --alphas 0.01 --tuning-seeds 100"
few="--data.limit 2000 --client.epochs 2 --lrs 0.08,0.16,0.32 --seeds 0,1,2"
cheapest="real,raw copies,gradient coding,FedMERF,FedMERF (summed),one-shot FedMERF (summed),FedMix,FedGEN"
# shellcheck disable=SC2086
{
    experiment "E-commons-digits" $commons --seeds 0,1,2,3,4 --data.split random --worst-case 12 --targets 0.97
    experiment "E-commons-mnist" $commons --dataset mnist $few --worst-case 12
    experiment "E-commons-fmnist" $commons --dataset fmnist $few --worst-case 12
    experiment "E-commons-cifar10" $commons --dataset cifar10 $few --ways "$cheapest"
}
