#!/bin/sh
# make ports-test: holds the ports against ./kvcomp, in a virtual environment of their own.
#
#     sh data/ports/test.sh [FOLDER]        the environment, build/ports unless given
#
# It makes the folder once, and says first what that takes. A torch that python3 has already is used as it is. Without
# the packages 5 ports x 13 models are left out, and the exit code is 0: nothing was wrong.
env=${1:-build/ports}
need_gb=7

leave_out() {
    echo "all 5 ports on 13 models are left out: $1"
    exit 0
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || leave_out "python3 3.10 or later is needed"
if ! "$env/bin/python" data/ports/check.py --can-run 2>/dev/null; then
    python3 -c 'import venv, ensurepip' 2>/dev/null || leave_out "python3 has no venv (Debian: python3-venv)"
    if python3 -c 'import torch' 2>/dev/null; then
        echo "$env: python3's own torch, and transformers, accelerate, safetensors: 0.2 GB"
        need_gb=1
    else
        echo "$env: torch, transformers, accelerate, safetensors, numpy: on x86-64 Linux 5.6 GB on disk, because the"
        echo "torch of the package index brings CUDA's libraries, which nothing here uses; elsewhere 0.8 GB. To take a"
        echo "CPU build instead, install it for python3 first."
    fi
    mkdir -p "$env"
    free_gb=$(($(df -Pk "$env" | awk 'NR == 2 { print $4 }') / 1048576))
    [ "$free_gb" -ge "$need_gb" ] || leave_out "$env has $free_gb GB of room, $need_gb are needed"
    python3 -m venv --system-site-packages "$env" || leave_out "$env cannot be made"
    "$env/bin/pip" install --quiet torch 'transformers>=5.23' accelerate safetensors numpy ||
        leave_out "the packages cannot be installed"
    "$env/bin/python" data/ports/check.py --can-run || leave_out "the packages are too old"
fi
exec nice "$env/bin/python" -B data/ports/check.py
