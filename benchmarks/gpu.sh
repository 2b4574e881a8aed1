#!/usr/bin/env bash
# What a GPU does with it, in under nine minutes: the teacher pass, memory at N = 10 and 100, and the paper's setting.
#
#     benchmarks/gpu.sh cifar10.npz OUT             # on a machine with CUDA; cifar10.npz: train_images, train_labels, …
#     benchmarks/gpu.sh cifar10.npz OUT cpu 120     # the same at tiny sizes on a CPU, to try the script
#
# OUT gets a text and a JSON file a part, and the logs and histories of the runs. A part that fails does not keep the
# others from running; the script then ends with 1.
set -uo pipefail
if [ $# -lt 2 ] || [ ! -r "$1" ]; then
    echo "usage: $0 DATA.npz OUT [DEVICE [SECONDS]]; DATA.npz must be there${1:+, and $1 is not}" >&2
    exit 2
fi
data=$(realpath "$1")
out=$2
device=${3:-cuda}
seconds=${4:-210} # for the runs of crad and uniform
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
status=0

part() {
    local name=$1
    shift
    echo "== $name"
    timeout "${limit:-120}" "$@" 2>&1 | tee "$out/$name.txt" || { echo "$name failed"; status=1; }
}

if [ "$device" = cpu ]; then
    images=64 shard=32 samples=400 pool=resnet18@0.125,resnet18-half@0.125,cnn6@0.125 many=20 few=(--epochs 1 --own-images 32)
else
    images=8192 shard=4096 samples=50000 pool=resnet18,resnet18-half,cnn6 many=100 few=()
fi

part teachers python "$here/teachers.py" --device "$device" --images $images --runs 3 --data "$data" "${few[@]}" \
    --cache "$out/teachers" --json "$out/teachers.json"
part memory python "$here/learner_memory.py" --device "$device" --counts 10 $many --samples $shard --pool "$pool" \
    --runs 1 --json "$out/memory.json"
limit=$((seconds + 60)) part rounds python "$here/timed_rounds.py" --device "$device" --data "$data" \
    --samples $samples --pool "$pool" --seconds "$seconds" --out "$out/rounds" --json "$out/rounds.json"
exit $status
