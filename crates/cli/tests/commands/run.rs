//! What a command gets from `jericho run`.

use super::support::{Volume, fail, jericho, output, succeed};

/// A shell script under `jericho run`, with options before.
fn run(options: &[&str], script: &str) -> std::process::Command {
    let mut command = jericho(["run"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

#[test]
fn a_command_gets_the_library_the_mounts_and_the_policy() {
    let volume = Volume::mounted();
    let script =
        "echo $LD_PRELOAD; echo $JERICHO_DEVICES; echo $JERICHO_PLACEMENT; stat -c %Hd:%Ld .";
    let mut command = run(&["--placement", "always"], script);
    let said = succeed(command.current_dir(volume.mnt()).env("LD_PRELOAD", ""));
    let lines: Vec<_> = said.lines().collect();
    let [library, devices, placement, device] = lines[..] else {
        panic!("four lines: {said}");
    };
    assert!(library.ends_with("/libjericho_preload.so"), "{library}");
    assert!(
        devices.split(',').any(|d| d == device),
        "{devices}, {device}"
    );
    assert_eq!(placement, "always");
}

#[test]
fn a_library_that_was_preloaded_before_stays_behind_ours() {
    // Ours once more does not count twice.
    let first = succeed(run(&[], "echo $LD_PRELOAD").env("LD_PRELOAD", ""));
    let first = first.trim();
    // The dynamic linker says that it is missing, and goes on.
    let other = "/nonexistent/library.so";
    let list = format!("{other}:{first}");
    let said = succeed(run(&[], "echo $LD_PRELOAD").env("LD_PRELOAD", list));
    assert_eq!(said.trim(), format!("{first}:{other}"));
}

#[test]
fn without_the_library_a_command_runs_as_it_is() {
    let said = succeed(&mut run(&["--no-preload"], "echo \"<$LD_PRELOAD>\""));
    assert_eq!(said.trim(), "<>");
    let mut command = run(&["--no-preload", "--placement", "never"], "true");
    let message = fail(&mut command, 1);
    assert!(message.contains("--placement"), "{message}");
}

#[test]
fn the_status_of_a_command_is_passed_on() {
    for options in [[].as_slice(), &["--no-preload"]] {
        let status = |script: &str| output(&mut run(options, script)).status;
        assert_eq!(status("exit 0").code(), Some(0));
        assert_eq!(status("exit 7").code(), Some(7));
        let killed = status("kill -KILL $$");
        // The command has taken our process, so our caller sees the signal itself.
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&killed),
            Some(9)
        );
    }
}

#[test]
fn a_report_tells_what_was_read_without_the_kernel() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), vec![7u8; 65536]).unwrap();
    let script = "cat file > /dev/null; cat file | cksum > /dev/null";
    let report = volume.beside("report");
    let mut command = run(&[], script);
    command
        .current_dir(volume.mnt())
        .env("JERICHO_REPORT", &report);
    succeed(&mut command);
    let report = std::fs::read_to_string(report).unwrap();
    assert!(report.contains("inline with 65536 bytes"), "{report}");
    assert!(report.starts_with("jericho: process "), "{report}");
}
