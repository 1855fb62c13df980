//! Output for scripts and people: JSON, manual pages, and the commands `place` and `where`.

use super::support::{Volume, jericho, output, pattern, succeed};

#[test]
fn stat_prints_every_slice_with_its_counters_as_json() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), pattern(5, 1 << 20)).unwrap();
    std::fs::read(volume.at("file")).unwrap();
    let stat = volume.stat();
    let slices = stat["slices"].as_array().unwrap();
    assert_eq!(slices.len(), 2);
    for slice in slices {
        for field in [
            "id",
            "node",
            "capacity_bytes",
            "used_bytes",
            "frames",
            "resident",
            "dirty",
            "hits",
            "misses",
            "evictions",
            "written_back_bytes",
        ] {
            assert!(slice[field].is_u64(), "{field} in {slice}");
        }
        assert!(slice["locality"]["local"].is_u64(), "{slice}");
    }
    assert!(
        slices.iter().any(|s| s["hits"].as_u64() > Some(0)),
        "{stat}"
    );
    let locality = &stat["locality"];
    let (local, remote) = (&locality["local"], &locality["remote"]);
    let pages = local.as_u64().unwrap() + remote.as_u64().unwrap();
    assert!(
        pages >= 2 * (1 << 20) / 4096,
        "too few accesses are counted: {stat}"
    );
    let share = local.as_u64().unwrap() as f64 / pages as f64;
    let said = locality["share_local"].as_f64().unwrap();
    assert!((said - share).abs() < 1e-9, "{said} of {locality}");
    let table = succeed(jericho(["stat"]).arg(volume.mnt()));
    assert!(
        table.contains("RATIO") && table.contains("SLICE"),
        "{table}"
    );
}

#[test]
fn top_prints_text_without_a_terminal() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), pattern(7, 1 << 20)).unwrap();
    let once = succeed(jericho(["top", "--once"]).arg(volume.mnt()));
    for part in ["NODE", "SLICE", "LOCAL", "% local", "adaptive", "volume"] {
        assert!(once.contains(part), "{part:?} is not in {once}");
    }
    assert!(once.lines().all(|line| !line.contains('\u{1b}')), "{once}");

    // Without --once it continues until its output is closed.
    let mut command = jericho(["top", "--interval", "0.1"]);
    let mut child = command
        .arg(volume.mnt())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut views = std::io::BufRead::lines(out)
        .map(|line| line.unwrap())
        .filter(|line| line.contains("% local") || line.contains("- local"));
    assert!(views.next().unwrap().contains("since the mount"));
    assert!(views.next().unwrap().contains("the last "));
    drop(views);
    assert!(child.wait().unwrap().success());
}

#[test]
fn directories_in_the_root_go_round_robin_and_files_below_follow() {
    let volume = Volume::mounted();
    let slice_of = |path: &str| {
        let json = succeed(jericho(["where", "--json"]).arg(volume.at(path)));
        let found: serde_json::Value = serde_json::from_str(&json).unwrap();
        found["slice"].as_u64().unwrap()
    };
    for name in ["a", "b"] {
        std::fs::create_dir_all(volume.at(name).join("deep")).unwrap();
        std::fs::write(volume.at(name).join("deep/file"), b"x").unwrap();
    }
    assert_ne!(slice_of("a/deep/file"), slice_of("b/deep/file"));
    assert_eq!(slice_of("a"), slice_of("a/deep/file"));
}

#[test]
fn place_sets_the_node_of_new_files_and_move_also_moves_existing_files() {
    let volume = Volume::mounted();
    let node_of = |path: &str| {
        let json = succeed(jericho(["where", "--json"]).arg(volume.at(path)));
        let found: serde_json::Value = serde_json::from_str(&json).unwrap();
        found["home_node"].as_u64().unwrap()
    };
    let bytes = pattern(6, 2 << 20);
    std::fs::create_dir_all(volume.at("dir/sub")).unwrap();
    std::fs::write(volume.at("dir/sub/old"), &bytes).unwrap();
    let from = node_of("dir/sub/old");
    let to = 1 - from;
    let node = to.to_string();
    succeed(jericho(["place", "--node", &node]).arg(volume.at("dir")));
    std::fs::write(volume.at("dir/new"), &bytes).unwrap();
    assert_eq!((node_of("dir/new"), node_of("dir/sub/old")), (to, from));

    let said = succeed(jericho(["place", "--move", "--node", &node]).arg(volume.at("dir")));
    assert!(said.contains("2 files"), "{said}");
    assert_eq!(node_of("dir/sub/old"), to);
    assert!(std::fs::read(volume.at("dir/sub/old")).unwrap() == bytes);
    let json = succeed(jericho(["place", "--json"]).arg(volume.at("dir/sub")));
    let place: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (place["node"].as_u64(), place["explicit"].as_bool()),
        (Some(to), Some(true))
    );
    volume.remount();
    assert!(std::fs::read(volume.at("dir/sub/old")).unwrap() == bytes);
    assert_eq!(node_of("dir/sub/old"), to);
}

#[test]
fn the_policy_for_threads_is_set_for_a_volume_a_directory_and_a_file() {
    let volume = Volume::formatted();
    succeed(volume.mount_command().args(["--threads", "never"]));
    let of = |path: &str| {
        let json = succeed(jericho(["place", "--json"]).arg(volume.at(path)));
        let place: serde_json::Value = serde_json::from_str(&json).unwrap();
        let text = |name: &str| place[name].as_str().unwrap().to_owned();
        (text("threads"), text("threads_from"))
    };
    let is = |policy: &str, from: &str| (policy.to_owned(), from.to_owned());
    let set = |path: &str, policy: &str| {
        succeed(jericho(["place", "--threads", policy]).arg(volume.at(path)));
    };
    std::fs::create_dir(volume.at("dir")).unwrap();
    assert_eq!(of("dir"), is("never", "the volume"));
    set("dir", "always");
    std::fs::write(volume.at("dir/file"), b"x").unwrap();
    assert_eq!(of("dir"), is("always", "set here"));
    assert_eq!(of("dir/file"), is("always", "inherited"));
    set("dir/file", "adaptive");
    assert_eq!(of("dir/file"), is("adaptive", "set here"));
    volume.umount();
    volume.check();
    volume.mount();
    assert_eq!(of("dir"), is("always", "set here"));
    set("dir/file", "inherit");
    assert_eq!(of("dir/file"), is("always", "inherited"));
    set("dir", "inherit");
    assert_eq!(of("dir"), is("adaptive", "the volume"));
}

#[test]
fn no_listing_shows_the_control_attributes() {
    let volume = Volume::mounted();
    std::fs::write(volume.at("file"), b"x").unwrap();
    let mut names = vec![0u8; 4096];
    let length = rustix::fs::listxattr(volume.at("file"), &mut names[..]).unwrap();
    assert!(!String::from_utf8_lossy(&names[..length]).contains("jericho"));
}

#[test]
fn topology_prints_text_and_json() {
    let json = succeed(&mut jericho([
        "topology",
        "--json",
        "--topology",
        "virtual:4",
    ]));
    let topology: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(topology["nodes"].as_array().map(Vec::len), Some(4));
    assert!(!succeed(&mut jericho(["topology"])).is_empty());
}

#[test]
fn every_subcommand_has_a_manual_page_and_help_with_its_options() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    succeed(jericho(["man"]).arg(dir.path()));
    for name in [
        "format", "mount", "umount", "run", "stat", "top", "where", "place", "check", "nbd",
        "topology", "probe",
    ] {
        let page = dir.path().join(format!("jericho-{name}.1"));
        assert!(
            std::fs::read_to_string(&page).is_ok_and(|p| p.contains(name)),
            "{page:?}"
        );
        assert!(succeed(&mut jericho([name, "--help"])).contains("Usage: jericho"));
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeed(&mut jericho(["completions", shell])).contains("topology"));
    }
}

#[test]
fn a_check_shows_its_progress_on_a_terminal_only() {
    let volume = Volume::formatted();
    let silent = output(jericho(["check"]).arg(volume.file()));
    assert!(silent.status.success());
    assert_eq!(String::from_utf8_lossy(&silent.stderr), "");
    // script(1) gives the command a terminal, and copies what appears there.
    let program = env!("CARGO_BIN_EXE_jericho");
    let command = format!("{program} check {}", volume.file().display());
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &command, "/dev/null"]);
    let shown = succeed(script.stdin(std::process::Stdio::null()));
    assert!(shown.contains("is sound"), "{shown}");
    assert!(
        shown.contains("read") && shown.contains('\u{1b}'),
        "{shown}"
    );
}
