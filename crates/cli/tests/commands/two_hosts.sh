#!/bin/sh
# Two network namespaces stand in for two hosts: one serves a file, the other gives it to NBD clients, who copy to it and from it while the first is
# killed and started again. Runs inside `unshare -Urn`. Usage: two_hosts.sh JERICHO DIRECTORY (with a file `in`)
#
# With two more arguments, the kinds of sockets (--link) of the target and of the initiator, it runs inside `unshare -n`. Then the interfaces carry IP, too.
set -eu
jericho=$1 dir=$2 target_link=${3:-} initiator_link=${4:-auto}
here=$(realpath "$(dirname "$0")")
cd "$dir"
trap 'kill -9 $children 2>/dev/null || true' EXIT
. "$here/hosts.sh"

uri="nbd+unix:///?socket=$dir/socket"
truncate -s "$(stat -c %s in)" disk
serve
nsenter --net="/proc/$host/ns/net" "$jericho" nbd tyche://hostb/data --nic i0 --link "$initiator_link" --socket socket >nbd.out 2>nbd.log &
nbd=$!
children="$children $nbd"
until [ -S socket ]; do sleep 0.02; done

if [ "$target_link" ]; then
    ip address add 10.77.0.1/24 dev t0
    nsenter --net="/proc/$host/ns/net" ip address add 10.77.0.2/24 dev i0
    traffic() { python3 -B "$here/traffic.py" "$@"; }
    far() { nsenter --net="/proc/$host/ns/net" python3 -B "$here/traffic.py" "$@"; }
    far take 10.77.0.2 there &
    take=$!
    traffic give 10.77.0.2 in &
    give=$!
    traffic echo 10.77.0.2 100 &
    echo=$!
    children="$children $take $give $echo"
fi

# A copy during which the target is killed and started again, twice.
nbdcopy --flush in "$uri" &
copy=$!
children="$children $copy"
disturb "$copy"
nbdcopy "$uri" out
cmp in out
qemu-img compare -f raw -F raw in "$uri"
if [ "$target_link" ]; then
    wait "$take"
    wait "$give"
    wait "$echo"
    cmp in there
    # A question on the interfaces of both, with packet sockets.
    "$jericho" discover --nic t0
    nsenter --net="/proc/$host/ns/net" "$jericho" discover --nic i0 | grep tyche://hostb/data
fi
kill "$nbd"
wait "$nbd"
cmp in disk
kill "$serve"
wait "$serve"
