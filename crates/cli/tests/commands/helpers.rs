//! mount(8), /etc/fstab and umount(8), which run the command under other names.

use std::process::Command;

use super::support::{Volume, succeed};

/// A script for a mount namespace. It puts the helpers into /sbin, as `make install` does.
const WITH_HELPERS: &str = r#"
    # Unmounts other tests' mounts in this namespace: a daemon does not end while a namespace still has its mount.
    awk '$3 == "fuse.jericho" { print $2 }' /proc/self/mounts | xargs -r -n 1 umount -il || true
    mkdir sbin
    ln -s "$JERICHO" sbin/mount.fuse.jericho
    ln -s "$JERICHO" sbin/umount.fuse.jericho
    sbin=$(readlink -f /sbin)
    mkdir -p /run/mount
    mount -t tmpfs none /run/mount
    mount -t overlay -o "lowerdir=$PWD/sbin:$sbin" none "$sbin"
    trap 'rm -f disk/filler; umount -il "$MNT" 2>&- || true' EXIT


    mount -t fuse.jericho "$VOLUME" "$MNT" -o cache=32M,topology=virtual:2,log="$LOG",nofail
    echo kept > "$MNT/file"
    mount -o remount,noatime "$MNT"
    grep " $MNT " /proc/self/mounts | grep -q noatime
    umount "$MNT"
    # The check would fail if the daemon still ran: the helper makes umount(8) wait for the daemon's end.
    "$JERICHO" check "$VOLUME"

    echo "$VOLUME $MNT fuse.jericho ro,cache=32M,log=$LOG,nofail,_netdev,x-systemd.automount 0 0" > fstab
    mount -T fstab "$MNT"
    grep -q kept "$MNT/file"
    if touch "$MNT/other" 2>&-; then exit 1; fi
    umount "$MNT"

    # The helper's entry for umount(8) is readable for all users, and does not change the entries of other mounts.
    other="SRC=/elsewhere TARGET=$MNT ROOT=/ OPTS=uhelper=other"
    echo "$other" > /run/mount/utab
    (umask 077; mount -t fuse.jericho "$VOLUME" "$MNT" -o "cache=32M,log=$LOG")
    [ "$(stat -c %a /run/mount/utab)" = 644 ]
    grep -q uhelper=fuse.jericho /run/mount/utab
    "$JERICHO" umount "$MNT"
    [ "$(cat /run/mount/utab)" = "$other" ]
    rm /run/mount/utab

    # A lazy umount, with and without force, frees the directory although a file is open.
    for how in -l -fl; do
        mount -t fuse.jericho "$VOLUME" "$MNT" -o "cache=32M,log=$LOG"
        exec 3< "$MNT/file"
        umount $how "$MNT"
        if mountpoint -q "$MNT"; then exit 1; fi
        grep -q kept <&3
        exec 3<&-
        # The next mount waits for the daemon's end.
        mount -t fuse.jericho "$VOLUME" "$MNT" -o "cache=32M,log=$LOG"
        umount "$MNT"
    done

    # A volume with data that cannot be written is not unmounted.
    mkdir disk
    mount -t tmpfs -o size=96m none disk
    "$JERICHO" format --size 512M --sparse disk/volume
    mount -t fuse.jericho "$PWD/disk/volume" "$MNT" -o "cache=32M,log=$LOG"
    cat /dev/zero > disk/filler || [ -s disk/filler ]
    head -c 2000000 /dev/zero | tr '\0' k > "$MNT/kept"
    if umount "$MNT" 2> refused; then exit 1; fi
    grep -q 'stays mounted' refused
    grep -q -e --force refused
    mountpoint -q "$MNT"
    rm disk/filler
    "$JERICHO" sync "$MNT"
    umount "$MNT"
    "$JERICHO" check disk/volume
    mount -t fuse.jericho "$PWD/disk/volume" "$MNT" -o "cache=32M,log=$LOG"
    head -c 2000000 /dev/zero | tr '\0' k | cmp - "$MNT/kept"
    umount "$MNT"
    umount disk

    if mount -t fuse.jericho "$VOLUME" "$MNT" -o cache=32M,colour=red 2> refused; then exit 1; fi
    grep -q 'colour=red' refused
    if mountpoint -q "$MNT"; then exit 1; fi
    echo all done"#;

#[test]
fn mount_and_fstab_and_umount_of_the_system_work() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: needs root, to put helpers where mount(8) looks for them");
        return;
    }
    let volume = Volume::formatted();
    let scratch = volume.beside("scratch");
    std::fs::create_dir(&scratch).expect("mkdir");
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "timeout", "200"])
        .args(["sh", "-euxc", WITH_HELPERS])
        .current_dir(scratch)
        .env("JERICHO", env!("CARGO_BIN_EXE_jericho"))
        .env("VOLUME", volume.file())
        .env("MNT", volume.mnt())
        .env("LOG", volume.log());
    let said = succeed(&mut command);
    assert!(said.contains("all done"), "{said}");
}
