//! The test programs of the preload library, which make the C library's calls in all ways. They must behave on a mount under
//! `jericho run` as in an ordinary directory.

use crate::program::within_run;
use crate::volume::Volume;

#[allow(clippy::duplicate_mod)]
#[path = "../../../preload/tests/support/mod.rs"]
mod support;

fn same_on_a_mount(name: &str) {
    let volume = Volume::mounted("256M", 2, "32M");
    let dir = volume.make_dir("calls");
    support::compare(name, within_run, &dir);
    volume.finish();
}

macro_rules! same {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            same_on_a_mount(stringify!($name));
        })*

        #[test]
        fn every_program_is_run() {
            assert_eq!([$(stringify!($name)),*], support::NAMES);
        }
    };
}

same! { aliases allocator closing copying early flags forking limits pointers sharing signals streams threads turns }
