//! `jericho place`: shows placement, sets it, and moves files.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};

use crate::args::PlaceArgs;
use crate::failure::{Context, Failure, Outcome, print, print_json};
use crate::{control, size};

pub fn run(args: &PlaceArgs) -> Outcome {
    let place = requested(args)?;
    if let Some(policy) = args.threads {
        control::set_threads(&args.path, &policy.to_string())?;
    }
    let Some(place) = place else {
        return match args.threads {
            Some(_) if !args.json => Ok(ExitCode::SUCCESS),
            _ => show(args),
        };
    };
    let metadata =
        std::fs::symlink_metadata(&args.path).context(format_args!("{}", args.path.display()))?;
    if args.move_there {
        return move_all(&args.path, &metadata, &place);
    }
    if !metadata.is_dir() {
        return Err(Failure::new(format!(
            "{} is not a directory: a place applies to files that are created later; add --move to move \
             the file itself",
            args.path.display()
        )));
    }
    control::set_place(&args.path, &place)?;
    if args.json {
        return show(args);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the requested place in the daemon's notation. Checks it first, for a message that names the valid places.
fn requested(args: &PlaceArgs) -> Result<Option<String>, Failure> {
    if args.node.is_none() && args.slice.is_none() {
        if args.move_there {
            return Err(Failure::new(
                "the target is missing: --move needs --node N (or --slice N)",
            ));
        }
        return Ok(None);
    }
    let slices = control::stat(&args.path)?.slices;
    if let Some(node) = args.node {
        let nodes: BTreeSet<u16> = slices.iter().map(|s| s.node).collect();
        if !nodes.contains(&node) {
            return Err(Failure::new(format!(
                "{}: no slice of the volume is on node {node}; its slices are on {}",
                args.path.display(),
                list("node", nodes)
            )));
        }
        return Ok(Some(format!("node:{node}")));
    }
    let slice = args.slice.unwrap_or_default();
    if !slices.iter().any(|s| s.id == slice) {
        return Err(Failure::new(format!(
            "{}: the volume has no slice {slice}; it has {}",
            args.path.display(),
            list("slice", slices.iter().map(|s| s.id).collect())
        )));
    }
    Ok(Some(format!("slice:{slice}")))
}

fn list(what: &str, numbers: BTreeSet<u16>) -> String {
    let plural = if numbers.len() == 1 { "" } else { "s" };
    let numbers: Vec<String> = numbers.iter().map(u16::to_string).collect();
    format!("{what}{plural} {}", numbers.join(", "))
}

fn show(args: &PlaceArgs) -> Outcome {
    let place = control::place(&args.path)?;
    if args.json {
        print_json(&place)?;
    } else {
        let why = if place.explicit {
            "set here"
        } else {
            "inherited or assigned in turn"
        };
        print(&format!(
            "{}: slice {} on node {} ({why}); threads migrate there: {} ({})\n",
            args.path.display(),
            place.slice,
            place.node,
            place.threads,
            place.threads_from
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Progress of a move.
struct Moving {
    place: String,
    /// Device number of the filesystem. Files on other filesystems are not moved.
    device: u64,
    progress: ProgressBar,
    files: u64,
    bytes: u64,
    failures: u64,
}

fn move_all(path: &Path, metadata: &std::fs::Metadata, place: &str) -> Outcome {
    // Hides itself where standard error is not a terminal.
    let progress = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
        progress.set_style(style);
    }
    let mut moving = Moving {
        place: place.to_owned(),
        device: metadata.dev(),
        progress,
        files: 0,
        bytes: 0,
        failures: 0,
    };
    moving.one(path, metadata);
    moving.progress.finish_and_clear();
    let done = format!(
        "{} files ({}) moved",
        moving.files,
        size::human(moving.bytes)
    );
    if moving.failures > 0 {
        return Err(Failure::new(format!(
            "{}: {done}, {} could not be moved",
            path.display(),
            moving.failures
        )));
    }
    print(&format!("{done}\n"))?;
    Ok(ExitCode::SUCCESS)
}

impl Moving {
    /// Moves a tree. Uses a list of remaining directories instead of recursion, because trees may have any depth.
    fn one(&mut self, path: &Path, metadata: &std::fs::Metadata) {
        if !metadata.is_dir() {
            return self.file(path, metadata);
        }
        let mut directories: Vec<PathBuf> = vec![path.to_owned()];
        while let Some(dir) = directories.pop() {
            // Set first, so that files created during the move are placed right.
            if let Err(failure) = control::set_place(&dir, &self.place) {
                self.failed(&failure.to_string());
            }
            let entries = match std::fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(e) => {
                    self.failed(&format!("cannot read {}: {e}", dir.display()));
                    continue;
                }
            };
            for entry in entries {
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(e) => {
                        self.failed(&format!("cannot read {}: {e}", dir.display()));
                        break;
                    }
                };
                let path = entry.path();
                match std::fs::symlink_metadata(&path) {
                    Ok(m) if m.dev() != self.device => {}
                    Ok(m) if m.is_dir() => directories.push(path),
                    Ok(m) => self.file(&path, &m),
                    // The file was removed after it was listed.
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Err(e) => self.failed(&format!("{}: {e}", path.display())),
                }
            }
        }
    }

    fn file(&mut self, path: &Path, metadata: &std::fs::Metadata) {
        if !metadata.is_file() {
            return;
        }
        match control::move_to(path, &self.place) {
            Ok(()) => {
                self.files += 1;
                self.bytes += metadata.len();
                self.progress.set_message(format!(
                    "{} files, {}: {}",
                    self.files,
                    size::human(self.bytes),
                    path.display()
                ));
                self.progress.tick();
            }
            Err(_) if !path.exists() => {}
            Err(failure) => self.failed(&failure.to_string()),
        }
    }

    fn failed(&mut self, message: &str) {
        self.failures += 1;
        self.progress.suspend(|| eprintln!("jericho: {message}"));
    }
}
