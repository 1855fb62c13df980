//! A mount in a control group with a small memory limit.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::{Volume, fail, pattern, succeed};

/// A control group with a memory limit. It is removed when dropped.
struct Group {
    dir: PathBuf,
    old: bool,
}

impl Group {
    /// Makes a group below this process's group or one above it. Returns `None` and prints a message if that is not possible.
    fn new(name: &str, limit_bytes: u64) -> Option<Group> {
        let name = format!("jericho-test-{name}-{}", std::process::id());
        let made = Group::parents().into_iter().find_map(|(parent, old)| {
            if !old {
                // This fails in a group that has processes, except in the root group.
                let _ = std::fs::write(parent.join("cgroup.subtree_control"), "+memory");
            }
            let dir = parent.join(&name);
            std::fs::create_dir(&dir).ok()?;
            let group = Group { dir, old };
            let limited =
                std::fs::write(group.dir.join(group.limit_file()), limit_bytes.to_string());
            limited.ok().map(|()| group)
        });
        if made.is_none() {
            eprintln!(
                "SKIPPED: this machine or user cannot make a control group with a memory limit"
            );
        }
        made
    }

    /// Returns the groups to try as parents: this process's group and those above it, version 2 first. The flag is true for version 1.
    fn parents() -> Vec<(PathBuf, bool)> {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mount = |kind: &str, option: &str| {
            mounts.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                let fits = fields[2] == kind
                    && (option.is_empty() || fields[3].split(',').any(|o| o == option));
                fits.then(|| PathBuf::from(fields[1]))
            })
        };
        let group = |controller: &str| {
            own.lines().find_map(|line| {
                let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
                (controllers.split(',').any(|c| c == controller))
                    .then(|| path.trim_start_matches('/').to_owned())
            })
        };
        let places = [("cgroup2", "", ""), ("cgroup", "memory", "memory")];
        let mut found = vec![];
        for (kind, option, controller) in places {
            if let (Some(mount), Some(group)) = (mount(kind, option), group(controller)) {
                let group = Path::new(&group);
                found.extend(group.ancestors().map(|g| (mount.join(g), kind == "cgroup")));
            }
        }
        found
    }

    fn limit_file(&self) -> &'static str {
        if self.old {
            "memory.limit_in_bytes"
        } else {
            "memory.max"
        }
    }

    /// Returns a command that runs in the group.
    fn run(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        inside
            .arg(self.dir.join("cgroup.procs"))
            .arg(command.get_program())
            .args(command.get_args());
        inside.arg0("sh");
        inside
    }

    /// Returns how many processes the kernel killed for the limit.
    fn kills(&self) -> u64 {
        let file = if self.old {
            "memory.oom_control"
        } else {
            "memory.events"
        };
        let text = std::fs::read_to_string(self.dir.join(file)).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.expect("a count of kills").trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The memory charged to the group is freed with its processes.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while std::fs::remove_dir(&self.dir).is_err() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

#[test]
fn a_volume_works_in_a_control_group_with_little_memory() {
    for mib in [256, 64] {
        let Some(group) = Group::new(&format!("little{mib}"), mib << 20) else {
            return;
        };
        let volume = Volume::formatted();
        let mut mount = super::support::jericho(["mount", "--log"]);
        mount.arg(volume.log()).arg(volume.file()).arg(volume.mnt());
        succeed(&mut group.run(&mount));
        let data = pattern(mib, 100 << 20);
        std::fs::write(volume.at("large"), &data).unwrap();
        let directory = volume.at("many");
        std::fs::create_dir(&directory).unwrap();
        for file in 0..20_000 {
            std::fs::write(directory.join(file.to_string()), b"x").unwrap();
        }
        assert!(std::fs::read(volume.at("large")).unwrap() == data);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 20_000);
        assert_eq!(group.kills(), 0, "with {mib} MiB");
        volume.umount();
        volume.check();
    }
}

#[test]
fn with_too_little_memory_the_message_names_the_control_group_and_the_needed_size() {
    let Some(group) = Group::new("none", 36 << 20) else {
        return;
    };
    let volume = Volume::formatted();
    let message = fail(&mut group.run(&volume.mount_command()), 1);
    for part in ["control group", group.limit_file(), "36 MiB", "40"] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
}
