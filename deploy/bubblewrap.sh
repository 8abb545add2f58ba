#!/bin/sh
# Runs a worker in a sandbox of its own, without root: it sees the system read-only, its Python, its state folder and the
# enclave's certificate; no home, no other process, no other file. The network is shared, because it must listen:
# what it may reach is for the machine's firewall to say.
#
#   deploy/bubblewrap.sh STATE ENCLAVE_CERTIFICATE [flags of darknight.worker]
#   PYTHON=/opt/darknight/bin/python deploy/bubblewrap.sh ~/worker enclave.pem --listen 0.0.0.0:7001 --operator acme
#
# PYTHON is the interpreter that darknight-worker is installed in; python3 of the PATH if it is not set. The worker gets
# no variable of yours, so settings are given as flags.
# For a GPU: put `--dev-bind /dev /dev --ro-bind /sys /sys` where `--dev /dev` is.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: bubblewrap.sh STATE ENCLAVE_CERTIFICATE [flags of darknight.worker]" >&2
    exit 2
fi
state=$1 certificate=$2
shift 2
python=$(command -v "${PYTHON:-python3}") || { echo "bubblewrap.sh: there is no ${PYTHON:-python3}" >&2; exit 2; }
mkdir -p "$state"

# Where Python and the package live: usually one folder or under /usr, which is there anyway.
seen=$("$python" -c 'import os, sys, darknight
for folder in {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.abspath(darknight.__file__)))}:
    print(folder)')

set -- "$python" -m darknight.worker --state /state --allow-enclave /enclave.pem "$@"
while IFS= read -r folder; do
    case $folder in
    /usr | /usr/*) ;;
    *) set -- --ro-bind "$folder" "$folder" "$@" ;;
    esac
done <<FOLDERS
$seen
FOLDERS
for folder in bin lib lib32 lib64 sbin; do # links into /usr, or folders on older systems
    if [ -L "/$folder" ]; then
        set -- --symlink "$(readlink "/$folder")" "/$folder" "$@"
    elif [ -d "/$folder" ]; then
        set -- --ro-bind "/$folder" "/$folder" "$@"
    fi
done

bwrap \
    --unshare-all --share-net --die-with-parent --as-pid-1 --new-session --cap-drop ALL \
    --clearenv --setenv PATH /usr/bin:/bin --setenv PYTHONDONTWRITEBYTECODE 1 \
    --ro-bind /usr /usr \
    --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache --ro-bind-try /etc/hosts /etc/hosts \
    --ro-bind-try /etc/nsswitch.conf /etc/nsswitch.conf --ro-bind-try /etc/resolv.conf /etc/resolv.conf \
    --proc /proc --dev /dev --tmpfs /tmp \
    --ro-bind-try /sys/fs/cgroup /sys/fs/cgroup \
    --bind "$state" /state --ro-bind "$certificate" /enclave.pem \
    --chdir / \
    "$@" &
bwrap=$!

# bwrap keeps signals to itself and would take the worker down with it; a worker that is asked to stop finishes its task.
asked=
trap 'asked=yes; kill -s TERM $(cat "/proc/$bwrap/task/$bwrap/children")' TERM
trap 'asked=yes; kill -s INT $(cat "/proc/$bwrap/task/$bwrap/children")' INT
while :; do
    code=0
    wait "$bwrap" || code=$?
    [ -n "$asked" ] || break # else the wait was cut short by the signal
    asked=
done
exit "$code"
