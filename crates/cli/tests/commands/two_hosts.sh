#!/bin/sh
# Two network namespaces stand in for two hosts: one serves a file, the other gives it to NBD clients, who copy to it and from it while the first is
# killed and started again. Runs inside `unshare -Urn`. Usage: two_hosts.sh JERICHO DIRECTORY (with a file `in`)
set -eu
jericho=$1 dir=$2
cd "$dir"

children=""
trap 'kill -9 $children 2>/dev/null || true' EXIT

ip link add t0 mtu 9000 type veth peer name i0 mtu 9000
unshare -n sleep 600 &
host=$!
children="$children $host"
while [ "$(readlink "/proc/$host/ns/net")" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link set i0 netns "$host"
ip link set t0 up
other() { nsenter --net="/proc/$host/ns/net" "$@"; }
other ip link set i0 up

serve() {
    rm -f serving
    "$jericho" serve disk --name data --host hostb --nic t0 --no-auth --state state >serving 2>>serve.log &
    serve=$!
    children="$children $serve"
    until grep -q tyche serving; do sleep 0.02; done
}

uri="nbd+unix:///?socket=$dir/socket"
truncate -s "$(stat -c %s in)" disk
serve
# Without the function: its background process would be a shell.
nsenter --net="/proc/$host/ns/net" "$jericho" nbd tyche://hostb/data --nic i0 --socket socket >nbd.out 2>nbd.log &
nbd=$!
children="$children $nbd"
until [ -S socket ]; do sleep 0.02; done

# A copy during which the target is killed and started again, twice.
nbdcopy --flush in "$uri" &
copy=$!
children="$children $copy"
for _ in 1 2; do
    sleep 0.2
    kill -9 "$serve"
    wait "$serve" || true
    sleep 0.1
    serve
done
wait "$copy"
nbdcopy "$uri" out
cmp in out
qemu-img compare -f raw -F raw in "$uri"
kill "$nbd"
wait "$nbd"
cmp in disk
kill "$serve"
wait "$serve"
