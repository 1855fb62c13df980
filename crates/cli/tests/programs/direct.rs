//! O_DIRECT and ordinary descriptors on the same file see the same bytes.

use crate::program::{run_in, shell_in};
use crate::volume::Volume;

#[test]
fn direct_and_buffered_access_see_the_same_bytes() {
    let volume = Volume::mounted("256M", 2, "8M");
    let dir = volume.make_dir("dd");
    let reference = volume.outside("reference");
    let reference = reference.to_str().expect("the path is UTF-8");
    shell_in(
        &dir,
        &format!("head -c 33554432 /dev/urandom > {reference}"),
    );
    run_in(
        &dir,
        "dd",
        &[
            &format!("if={reference}"),
            "of=direct",
            "bs=64k",
            "oflag=direct",
        ],
    );
    run_in(&dir, "cmp", &[reference, "direct"]);
    run_in(
        &dir,
        "dd",
        &[&format!("if={reference}"), "of=buffered", "bs=7000"],
    );
    shell_in(
        &dir,
        &format!("dd if=buffered iflag=direct bs=4k | cmp - {reference}"),
    );
    // Each kind of descriptor replaces a page, and the other kind must see it.
    shell_in(
        &dir,
        &format!(
            "dd if=/dev/zero of={reference} bs=4k seek=100 count=1 conv=notrunc
             dd if=/dev/zero of=buffered bs=4k seek=100 count=1 conv=notrunc oflag=direct
             dd if=/dev/zero of=direct bs=4k seek=100 count=1 conv=notrunc,fsync
             cmp {reference} buffered
             dd if=direct iflag=direct bs=1M | cmp - {reference}"
        ),
    );
    volume.remount();
    run_in(&dir, "cmp", &[reference, "direct"]);
    run_in(&dir, "cmp", &[reference, "buffered"]);
    volume.finish();
}
