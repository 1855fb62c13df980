//! How much memory this process may use: the machine's, or less if a control group says so.

use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::size;

/// Refuses a cache that cannot fit; the kernel would kill somebody for it later.
pub fn check_cache(cache_bytes: u64) -> Result<(), Failure> {
    let Some((limit_bytes, whose)) = limit(Path::new("/")) else {
        return Ok(());
    };
    if cache_bytes < limit_bytes {
        return Ok(());
    }
    Err(Failure::new(format!(
        "a cache of {} does not fit into {} of {}; give --cache a smaller size, or leave it out for \
         an eighth of the memory",
        size::human(cache_bytes),
        size::human(limit_bytes),
        whose,
    )))
}

/// The smallest limit, in bytes, and what sets it.
fn limit(root: &Path) -> Option<(u64, String)> {
    let machine = std::fs::read_to_string(root.join("proc/meminfo"))
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
            let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
            Some((kib << 10, "memory".to_owned()))
        });
    machine.into_iter().chain(group_limits(root)).min()
}

/// Limits of the process's control group and of those around it.
fn group_limits(root: &Path) -> Vec<(u64, String)> {
    let Ok(text) = std::fs::read_to_string(root.join("proc/self/cgroup")) else {
        return Vec::new();
    };
    let mut limits = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (base, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            c if c.split(',').any(|c| c == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = PathBuf::from(group.trim_start_matches('/'));
        for ancestor in group.ancestors() {
            let path = root.join(base).join(ancestor).join(file);
            // "max" is no limit.
            let bytes = std::fs::read_to_string(&path)
                .ok()
                .and_then(|t| t.trim().parse().ok());
            if let Some(bytes) = bytes {
                let name = format!("memory of control group /{}", ancestor.display());
                limits.push((bytes, name));
            }
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_around_the_process_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "proc/meminfo",
            "MemTotal:       1048576 kB\nMemFree: 1 kB\n",
        );
        assert_eq!(limit(root.path()), Some((1 << 30, "memory".into())));
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/b/memory.max", "max\n");
        write("sys/fs/cgroup/a/memory.max", "268435456\n");
        assert_eq!(
            limit(root.path()),
            Some((256 << 20, "memory of control group /a".into()))
        );
    }

    #[test]
    fn a_cache_larger_than_any_memory_is_refused() {
        let message = check_cache(1 << 60).unwrap_err().to_string();
        assert!(message.contains("--cache"), "{message}");
    }
}
