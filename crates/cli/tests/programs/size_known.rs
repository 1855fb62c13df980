//! Calls for which the kernel has to know the size of a file that a program has extended inline: appends, seeks to the end, copies.

use crate::program::{command, succeed, under_run};
use crate::volume::Volume;

const SCRIPT: &str = include_str!("size_known.py");
const FORGOTTEN: &str = include_str!("size_forgotten.py");

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

#[test]
fn the_kernel_knows_the_end_of_a_file_as_soon_as_its_inline_writer_has_closed_it() {
    let volume = Volume::mounted("256M", 1, "32M");
    let script = volume.outside("size_forgotten.py");
    std::fs::write(&script, FORGOTTEN).expect("the script");
    let mut with_library = under_run("python3");
    with_library.arg(&script).arg(volume.at("library"));
    assert_eq!(succeed(with_library.arg("library")), "right\n");
    let mut without = command("python3");
    without.arg(&script).arg(volume.at("kernel")).arg("kernel");
    let run = under_run("env");
    without.arg(run.get_program()).args(run.get_args());
    assert_eq!(succeed(&mut without), "right\n");
    volume.finish();
}
