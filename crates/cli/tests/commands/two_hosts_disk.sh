#!/bin/sh
# Two network namespaces stand in for two hosts: one serves a file, the other attaches it as a disk and writes to it while the first is killed and
# started again. Runs inside `unshare -Urnm` (file) or as root inside `unshare -nm` (loop). Usage: two_hosts_disk.sh file|loop JERICHO DIRECTORY (with a
# file `in`)
set -eu
how=$1 jericho=$2 dir=$3
here=$(dirname "$0")
cd "$dir"

children=""
device=""
finish() {
    umount mnt 2>/dev/null || true
    if [ -n "$device" ]; then "$jericho" detach --force "$device" 2>/dev/null || true; fi
    kill -9 $children 2>/dev/null || true
}
trap finish EXIT

. "$here/hosts.sh"

truncate -s 400M disk
serve
option=""
if [ "$how" = loop ]; then option=--loop; fi
device=$(nsenter --net="/proc/$host/ns/net" "$jericho" attach tyche://hostb/data --nic i0 --at at --log attach.log $option)

if [ "$how" = file ]; then
    dd if=in of="$device" bs=256k conv=notrunc,fsync status=none &
    disturb $!
    cmp -n "$(stat -c %s in)" in "$device"
    # Any sizes, many at a time, compared with what was written.
    fio --name=verify --filename="$device" --offset=128M --size=32M --rw=randrw --bsrange=512-64k --bs_unaligned=1 --ioengine=psync --thread \
        --numjobs=8 --offset_increment=32M --fsync=50 --verify=crc32c --verify_fatal=1 --do_verify=1 --output=fio.log
else
    mkfs.ext4 -q -F "$device"
    mkdir mnt
    mount "$device" mnt
    sh -c 'cp in mnt/first && sync mnt/first && cp in mnt/second && sync -f mnt' &
    disturb $!
    cmp in mnt/first
    umount mnt
    e2fsck -fn "$device"
fi
"$jericho" detach tyche://hostb/data
device=""
kill "$serve"
wait "$serve"
if [ "$how" = file ]; then
    cmp -n "$(stat -c %s in)" in disk
else
    e2fsck -fn disk
    debugfs -R 'dump /second out' disk
    cmp in out
fi
