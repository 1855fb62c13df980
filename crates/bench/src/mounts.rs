//! The mounts that are compared: Jericho volumes and libfuse's passthrough.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;
use crate::settings::{Settings, Transport};

/// Runs a command to its end. Returns its output, or an error with everything that it printed.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    Err(format!("{command:?} failed ({}):\n{out}{err}", output.status).into())
}

/// Compiles a program of the benchmark into the directory of the run. `flag` is a compiler flag.
pub fn compile(settings: &Settings, name: &str, source: &str, flag: &str) -> Result<PathBuf> {
    let (file, program) = (
        settings.dir.join(format!("{name}.c")),
        settings.dir.join(name),
    );
    fs::write(&file, source)?;
    run(Command::new("cc")
        .args(["-std=c11", "-O2", "-o"])
        .args([&program, &file])
        .arg(flag))?;
    Ok(program)
}

/// A volume on an ordinary file.
pub struct Volume {
    jericho: PathBuf,
    /// Path of the file.
    pub file: PathBuf,
    mnt: PathBuf,
    mounted: bool,
    /// Transport of the next mount.
    pub transport: Transport,
}

impl Volume {
    /// Formats a volume of one slice.
    pub fn format(settings: &Settings, name: &str, size: &str) -> Result<Volume> {
        let file = settings.dir.join(format!("{name}.volume"));
        let mnt = settings.dir.join(format!("{name}.mnt"));
        fs::create_dir_all(&mnt)?;
        run(Command::new(&settings.jericho)
            .arg("format")
            .arg(&file)
            .args(["--size", size, "--slices", "1"]))?;
        Ok(Volume {
            jericho: settings.jericho.clone(),
            file,
            mnt,
            mounted: false,
            transport: Transport::Device,
        })
    }

    /// Mounts the volume with a new, empty cache.
    pub fn mount(&mut self, cache: &str) -> Result<()> {
        run(Command::new(&self.jericho)
            .arg("mount")
            .arg(&self.file)
            .arg(&self.mnt)
            .args(["--cache", cache])
            .args(["--transport", self.transport.name()]))?;
        self.mounted = true;
        Ok(())
    }

    /// Unmounts the volume. Everything is on the device afterwards.
    pub fn umount(&mut self) -> Result<()> {
        run(Command::new(&self.jericho).arg("umount").arg(&self.mnt))?;
        self.mounted = false;
        Ok(())
    }

    /// Returns the mount point.
    pub fn mnt(&self) -> &Path {
        &self.mnt
    }

    /// Returns the output of `jericho stat --json`.
    pub fn stat(&self) -> Result<Value> {
        let text = run(Command::new(&self.jericho)
            .arg("stat")
            .arg(&self.mnt)
            .arg("--json"))?;
        Ok(serde_json::from_str(&text)
            .map_err(|e| format!("jericho stat printed no JSON ({e}): {text}"))?)
    }

    /// Returns the sum of a counter over the slices.
    pub fn total(&self, counter: &str) -> Result<u64> {
        let stat = self.stat()?;
        let slices = stat["slices"]
            .as_array()
            .ok_or("jericho stat lists no slices")?;
        slices
            .iter()
            .map(|s| {
                s[counter]
                    .as_u64()
                    .ok_or_else(|| format!("no counter {counter}").into())
            })
            .sum()
    }

    /// Returns the process id of the daemon.
    pub fn daemon_pid(&self) -> Result<u32> {
        let pid = self.stat()?["pid"]
            .as_u64()
            .and_then(|pid| u32::try_from(pid).ok());
        Ok(pid.ok_or("jericho stat tells no pid")?)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.mounted && self.umount().is_err() {
            detach(&self.mnt);
        }
        remove(&self.file);
    }
}

/// passthrough_hp over a directory on the same device.
pub struct Passthrough {
    child: Child,
    /// The directory that it passes through.
    pub source: PathBuf,
    mnt: PathBuf,
}

/// Options of passthrough_hp. The variant without splice is the fastest one for small transfers, so it is the baseline.
const PASSTHROUGH_OPTIONS: [&str; 2] = ["--foreground", "--nosplice"];

impl Passthrough {
    /// Mounts an empty directory through passthrough_hp.
    pub fn mount(settings: &Settings, name: &str) -> Result<Passthrough> {
        let (source, mnt) = (
            settings.dir.join(format!("{name}.source")),
            settings.dir.join(format!("{name}.mnt")),
        );
        fs::create_dir_all(&source)?;
        fs::create_dir_all(&mnt)?;
        let before = device_of(&mnt)?;
        let mut child = Command::new(&settings.passthrough)
            .args(PASSTHROUGH_OPTIONS)
            .arg(&source)
            .arg(&mnt)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| format!("{}: {e}", settings.passthrough.display()))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while device_of(&mnt)? == before {
            if child.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(format!(
                    "{} did not mount {}",
                    settings.passthrough.display(),
                    mnt.display()
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Passthrough { child, source, mnt })
    }

    /// Returns the mount point.
    pub fn mnt(&self) -> &Path {
        &self.mnt
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        detach(&self.mnt);
        // The process ends after the unmount. If the unmount failed, the process must be killed.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(200));
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Err(e) = fs::remove_dir_all(&self.source) {
            eprintln!("{} could not be removed: {e}", self.source.display());
        }
    }
}

/// Returns the device number of a directory. It changes when something is mounted there.
fn device_of(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(fs::metadata(path)
        .map_err(|e| format!("{}: {e}", path.display()))?
        .dev())
}

/// Unmounts a directory. Prints a message if that fails.
pub fn detach(mnt: &Path) {
    let lazily = [("umount", "-l"), ("fusermount3", "-uz")];
    let ended = lazily
        .iter()
        .any(|(program, option)| run(Command::new(program).arg(option).arg(mnt)).is_ok());
    if !ended {
        eprintln!("{} could not be unmounted", mnt.display());
    }
}

fn remove(file: &Path) {
    if let Err(e) = fs::remove_file(file) {
        eprintln!("{} could not be removed: {e}", file.display());
    }
}
