//! The environment that `jericho run` gives a command, and the command's status and report.

use super::support::{Volume, fail, jericho, output, succeed};

/// Returns a command that runs a shell script under `jericho run` with options.
fn run(options: &[&str], script: &str) -> std::process::Command {
    let mut command = jericho(["run"]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

#[test]
fn a_command_gets_the_library_the_mounts_and_the_policy() {
    let volume = Volume::mounted();
    let script =
        "echo $LD_PRELOAD; echo $JERICHO_DEVICES; echo $JERICHO_THREADS; stat -c %Hd:%Ld .";
    let mut command = run(&["--threads", "always"], script);
    let said = succeed(command.current_dir(volume.mnt()).env("LD_PRELOAD", ""));
    let lines: Vec<_> = said.lines().collect();
    let [library, devices, policy, device] = lines[..] else {
        panic!("expected four lines: {said}");
    };
    assert!(library.ends_with("/libjericho_preload.so"), "{library}");
    assert!(
        devices.split(',').any(|d| d == device),
        "{devices}, {device}"
    );
    assert_eq!(policy, "always");
}

#[test]
fn a_library_that_was_preloaded_before_stays_after_jerichos() {
    // A second entry of Jericho's library is dropped.
    let first = succeed(run(&[], "echo $LD_PRELOAD").env("LD_PRELOAD", ""));
    let first = first.trim();
    // The dynamic linker prints that the library is missing, and continues.
    let other = "/nonexistent/library.so";
    let list = format!("{other}:{first}");
    let said = succeed(run(&[], "echo $LD_PRELOAD").env("LD_PRELOAD", list));
    assert_eq!(said.trim(), format!("{first}:{other}"));
}

#[test]
fn without_the_library_a_command_gets_no_preload() {
    let said = succeed(&mut run(&["--no-preload"], "echo \"<$LD_PRELOAD>\""));
    assert_eq!(said.trim(), "<>");
    let mut command = run(&["--no-preload", "--threads", "never"], "true");
    let message = fail(&mut command, 1);
    assert!(message.contains("--threads"), "{message}");
}

#[test]
fn run_passes_on_the_status_of_a_command() {
    for options in [[].as_slice(), &["--no-preload"]] {
        let status = |script: &str| output(&mut run(options, script)).status;
        assert_eq!(status("exit 0").code(), Some(0));
        assert_eq!(status("exit 7").code(), Some(7));
        let killed = status("kill -KILL $$");
        // The command runs in the process of `jericho run`, so the test sees the signal itself.
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&killed),
            Some(9)
        );
    }
}

#[test]
fn a_report_counts_reads_without_the_kernel() {
    let volume = Volume::mounted();
    // The file is long, because the first calls go through the kernel.
    std::fs::write(volume.at("file"), vec![7u8; 8 << 20]).unwrap();
    let script = "cat file > /dev/null; cat file | cksum > /dev/null";
    let report = volume.beside("report");
    let mut command = run(&[], script);
    command
        .current_dir(volume.mnt())
        .env("JERICHO_REPORT", &report);
    succeed(&mut command);
    let report = std::fs::read_to_string(report).unwrap();
    let words: Vec<&str> = report.split_whitespace().collect();
    let inline = words.windows(2).filter(|w| w[0] == "with");
    let bytes: Vec<u64> = inline.filter_map(|w| w[1].parse().ok()).collect();
    assert!(bytes.iter().any(|bytes| *bytes > 4 << 20), "{report}");
    assert!(report.starts_with("jericho: process "), "{report}");
}

/// Runs a command. Returns how many bytes it read inline on the node of the data, and from another node.
fn local_and_remote(volume: &Volume, options: &[&str], script: &str) -> (u64, u64) {
    let path = volume.beside("report");
    let mut command = run(options, script);
    command.current_dir(volume.mnt());
    succeed(command.env("JERICHO_REPORT", &path));
    let report = std::fs::read_to_string(&path).unwrap();
    // The library would append the next report.
    std::fs::remove_file(path).unwrap();
    let mut lines = report.lines();
    let line = lines.rfind(|line| line.contains("local: ")).unwrap();
    let numbers = line.split(|c: char| !c.is_ascii_digit());
    // Two numbers of the share come first.
    let numbers: Vec<u64> = numbers.filter_map(|n| n.parse().ok()).skip(2).collect();
    let [local, remote] = numbers[..] else {
        panic!("expected two numbers of bytes: {line}");
    };
    (local, remote)
}

#[test]
fn a_program_reads_near_its_data_unless_it_is_bound_elsewhere() {
    let own = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu));
    let first = first.unwrap();
    if own.count() < 2 {
        eprintln!("not tested: there is one CPU");
        return;
    }
    let volume = Volume::mounted();
    const BYTES: u64 = 4 << 20;
    for node in ["0", "1"] {
        let dir = volume.at(node);
        std::fs::create_dir(&dir).unwrap();
        succeed(jericho(["place", "--node", node]).arg(&dir));
        std::fs::write(dir.join("file"), vec![7; BYTES as usize]).unwrap();
        let script = format!("cat {node}/file > /dev/null");
        let (local, remote) = local_and_remote(&volume, &["--threads", "always"], &script);
        assert!(local + remote >= BYTES / 10 * 9, "inline: {local} {remote}");
        // At its first access the program may still run on another node.
        assert!(remote <= BYTES / 10, "node {node}: {local} {remote}");
    }
    // The first CPU belongs to node 0, and the program binds itself to it.
    let script = format!("taskset -c {first} cat 1/file > /dev/null");
    let (local, remote) = local_and_remote(&volume, &["--threads", "always"], &script);
    assert_eq!(local, 0, "migrated against its affinity; {remote}");
    assert!(remote >= BYTES / 10 * 9, "inline: {remote}");
}
