# Read by scripts in which two network namespaces stand in for two hosts. This one serves the file `disk`, and the other one, $host, has the interface i0.
# Needs $jericho, and works in the directory of the script. $target_link has the sockets of the target, if it is set. $children has the processes to kill at the end.

children=""
"$jericho" key new >key
chmod 600 key
export JERICHO_KEY="$PWD/key"
ip link add t0 mtu 9000 type veth peer name i0 mtu 9000
unshare -n sleep 600 &
host=$!
children="$children $host"
while [ "$(readlink "/proc/$host/ns/net")" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link set i0 netns "$host"
ip link set t0 up
nsenter --net="/proc/$host/ns/net" ip link set i0 up

# Starts the target. $serve is its process.
serve() {
    rm -f serving
    "$jericho" serve disk --name data --host hostb --nic t0 --client host:key --state state --link "${target_link:-auto}" >serving 2>>serve.log &
    serve=$!
    children="$children $serve"
    until grep -q tyche serving; do sleep 0.02; done
}

# Kills the target and starts it again, twice, while a process runs. Waits for the process.
disturb() {
    for _ in 1 2; do
        sleep 0.2
        kill -9 "$serve"
        wait "$serve" || true
        sleep 0.1
        serve
    done
    wait "$1"
}
