#!/bin/sh
# Three network namespaces stand in for three hosts: `jericho wire` runs on the middle one, between the hosts a and b. Runs inside `unshare -Urnm`.
# Leaves what the wire printed in the file `wire`. Usage: three_hosts.sh JERICHO TRAFFIC.PY DIRECTORY STORY [OPTION of jericho wire]...
set -eu
jericho=$1 traffic=$2 dir=$3 story=$4
shift 4
cd "$dir"

children=""
trap 'kill -9 $children 2>/dev/null || true' EXIT

# Waits for a condition, half a minute at most.
await() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        if [ $tries -gt 1500 ]; then
            echo "never true: $*" >&2
            exit 1
        fi
        sleep 0.02
    done
}
is_elsewhere() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }

# Makes a host with an interface e, whose other end is here.
host() {
    unshare -n sleep 600 &
    host=$!
    children="$children $host"
    await is_elsewhere "$host"
    ip link add "$1" mtu 9000 type veth peer name e mtu 9000 netns "/proc/$host/ns/net"
    ip link set "$1" up
    nsenter --net="/proc/$host/ns/net" sh -ec "
        sysctl -qw net.ipv6.conf.all.disable_ipv6=1 || true
        ip link set lo up
        ip link set e up
        ip addr add 10.0.0.$2/24 dev e"
}
on_a() { nsenter --net="/proc/$a/ns/net" "$@"; }

sysctl -qw net.ipv6.conf.all.disable_ipv6=1 || true
host wa 1
a=$host
host wb 2
b=$host

# grep complains about files that are not there yet.
touch wire wire.log serving
"$jericho" wire wa wb "$@" >wire 2>wire.log &
wire=$!
children="$children $wire"
await grep -q '^forwarding between wa and wb' wire

# Copies the file `in` over TCP.
copy() {
    nsenter --net="/proc/$b/ns/net" python3 "$traffic" take "$1" out &
    take=$!
    children="$children $take"
    on_a python3 "$traffic" give "$1" in
    wait "$take"
    cmp in out
}

case $story in
good)
    on_a python3 "$traffic" echo 10.0.0.2 20
    nsenter --net="/proc/$b/ns/net" python3 "$traffic" receive e receiving &
    receive=$!
    children="$children $receive"
    await [ -e receiving ]
    on_a python3 "$traffic" send e receiving
    wait "$receive"
    copy 10.0.0.2
    ;;
bad)
    copy 10.0.0.2
    truncate -s "$(stat -c %s in)" disk
    nsenter --net="/proc/$b/ns/net" "$jericho" serve disk --name data --host hostb --nic e --no-auth --state state >serving 2>serve.log &
    serve=$!
    children="$children $serve"
    await grep -q tyche serving
    nsenter --net="/proc/$a/ns/net" "$jericho" nbd tyche://hostb/data --nic e --socket socket >nbd.out 2>nbd.log &
    nbd=$!
    children="$children $nbd"
    await [ -S socket ]
    nbdcopy --flush in "nbd+unix:///?socket=$dir/socket"
    nbdcopy "nbd+unix:///?socket=$dir/socket" copied
    cmp in copied
    kill "$nbd"
    wait "$nbd"
    kill "$serve"
    wait "$serve"
    cmp in disk
    ;;
cut)
    on_a python3 "$traffic" echo 10.0.0.2 1
    mkfifo joined
    kill -USR1 "$wire"
    await grep -q 'the link is cut' wire.log
    on_a python3 "$traffic" across 10.0.0.2 joined &
    across=$!
    children="$children $across"
    # Opens when the requests were sent.
    : >joined
    kill -USR1 "$wire"
    wait "$across"
    ;;
esac
kill "$wire"
wait "$wire"
