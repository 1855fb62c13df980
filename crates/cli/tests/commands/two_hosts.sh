#!/bin/sh
# Two network namespaces stand in for two hosts: one serves a file, the other gives it to NBD clients, who copy to it and from it while the first is
# killed and started again. Runs inside `unshare -Urn`. Usage: two_hosts.sh JERICHO DIRECTORY (with a file `in`)
set -eu
jericho=$1 dir=$2
here=$(dirname "$0")
cd "$dir"
trap 'kill -9 $children 2>/dev/null || true' EXIT
. "$here/hosts.sh"

uri="nbd+unix:///?socket=$dir/socket"
truncate -s "$(stat -c %s in)" disk
serve
nsenter --net="/proc/$host/ns/net" "$jericho" nbd tyche://hostb/data --nic i0 --socket socket >nbd.out 2>nbd.log &
nbd=$!
children="$children $nbd"
until [ -S socket ]; do sleep 0.02; done

# A copy during which the target is killed and started again, twice.
nbdcopy --flush in "$uri" &
copy=$!
children="$children $copy"
disturb "$copy"
nbdcopy "$uri" out
cmp in out
qemu-img compare -f raw -F raw in "$uri"
kill "$nbd"
wait "$nbd"
cmp in disk
kill "$serve"
wait "$serve"
