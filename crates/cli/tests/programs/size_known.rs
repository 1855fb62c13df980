//! Appends whose position the kernel computes, after a program has extended the file inline.

use crate::program::{command, succeed, under_run};
use crate::volume::Volume;

const SCRIPT: &str = include_str!("size_known.py");

#[test]
fn an_append_through_the_kernel_knows_where_inline_writes_have_ended() {
    let volume = Volume::mounted("256M", 1, "32M");
    let script = volume.outside("size_known.py");
    std::fs::write(&script, SCRIPT).expect("the script");
    for (way, has_library) in [
        ("flag", false),
        ("offset", false),
        ("own", true),
        ("same", true),
        ("fork", true),
    ] {
        let mut program = match has_library {
            true => under_run("python3"),
            false => command("python3"),
        };
        program.arg(&script).arg(volume.at(way)).arg(way);
        let run = under_run("env");
        program.arg(run.get_program()).args(run.get_args());
        assert_eq!(succeed(&mut program), "right\n", "{way}");
    }
    volume.finish();
}
